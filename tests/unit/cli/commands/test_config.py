from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agl_cli.main import app
from agl_runtime.config import setting_paths
from fakes.projects import make_project


def show(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["config", "show", "--project", str(root), *arguments], catch_exceptions=False)


def rows(result: Result) -> dict[str, Any]:
    return {row["setting"]: row for row in json.loads(result.stdout)}


def test_every_setting_is_shown_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CFG_TRAIN__LR", "1e-4")
    found = rows(show(make_project(tmp_path / "project"), "--json", "--set", "train.seed=3"))
    assert list(found) == setting_paths()
    assert found["train.seed"] == {"setting": "train.seed", "value": 3, "origin": "--set train.seed"}
    assert found["train.lr"] == {"setting": "train.lr", "value": 0.0001, "origin": "AGL_CFG_TRAIN__LR"}
    assert found["train.steps"]["origin"] == "agl.yaml"
    assert found["train.epochs"] == {"setting": "train.epochs", "value": 1, "origin": "default"}


def test_secrets_are_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CFG_AGENT__ENV__TOKEN", "of-the-environment")
    settings = {"model": {"api_key": "sk-secret"}, "agent": {"env": {"SERVICE_KEY": "sesame"}}}
    root = make_project(tmp_path / "project", settings)
    for result in (show(root), show(root, "--json")):
        assert result.exit_code == 0
        for secret in ("sk-secret", "sesame", "of-the-environment"):
            assert secret not in result.stdout + result.stderr
    assert rows(show(root, "--json"))["model.api_key"]["value"] == "***"


def test_the_table_is_one_line_a_setting(tmp_path: Path) -> None:
    result = show(make_project(tmp_path / "project"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == len(setting_paths()) + 1


def test_a_project_is_found_from_a_folder_below(tmp_path: Path) -> None:
    below = make_project(tmp_path / "project") / "deep" / "down"
    below.mkdir(parents=True)
    assert show(below).exit_code == 0
