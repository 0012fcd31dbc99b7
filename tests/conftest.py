"""Every test runs with its own HOME and working directory and without agl's variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AGL_", "OPENAI_", "ANTHROPIC_")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tier of a test is its folder."""
    for item in items:
        tier = item.path.relative_to(Path(__file__).parent).parts[0]
        item.add_marker(getattr(pytest.mark, tier))
