"""What the documentation must keep up with."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_cli.reference import JSON_KEYS, RENDERED, commands
from agl_runtime.config import Config, setting_paths

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", RENDERED)
def test_the_generated_pages_are_current(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == RENDERED[name](), "run `python -m agl_cli.reference`"


@pytest.mark.parametrize("path", setting_paths())
def test_every_setting_is_documented(path: str) -> None:
    section, name = path.split(".")
    description = Config.model_fields[section].annotation.model_fields[name].description  # type: ignore[union-attr]
    assert description, f"{path} has no docstring"


@pytest.mark.parametrize("path", [path for path, _ in commands()])
def test_every_command_and_option_is_documented(path: str) -> None:
    command = dict(commands())[path]
    assert command.help
    assert [item.name for item in command.params if not item.help] == []


@pytest.mark.parametrize("path", [path for path, item in commands() if any("--json" in p.opts for p in item.params)])
def test_every_json_output_has_its_keys_documented(path: str) -> None:
    assert JSON_KEYS[path]
