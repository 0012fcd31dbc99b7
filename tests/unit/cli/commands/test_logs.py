from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agl_cli.commands import logs as logs_module
from agl_cli.main import app
from fakes.projects import make_project


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = make_project(tmp_path / "project")
    folder = root / ".agl" / "logs"
    folder.mkdir(parents=True)
    (folder / "gateway.log").write_text("g1\ng2\ng3\ncut", encoding="utf-8")
    (folder / "trainer.log").write_text("t1\n", encoding="utf-8")
    return root


def logs(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["logs", "--project", str(root), *arguments], catch_exceptions=False)


def test_the_last_whole_lines_of_one_part(root: Path) -> None:
    result = logs(root, "gateway", "-n", "2")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "g2\ng3\n", "")


def test_all_parts_are_told_apart(root: Path) -> None:
    assert logs(root, "-n", "1").stdout == "gateway    | g3\ntrainer    | t1\n"


def test_no_lines_when_none_are_wanted(root: Path) -> None:
    assert logs(root, "-n", "0").stdout == ""


def test_an_unknown_part_names_those_there_are(root: Path) -> None:
    result = logs(root, "trainr")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "No part is called 'trainr'." in result.stderr
    assert "gateway, controller, trainer, up" in result.stderr


def test_following_goes_on_with_what_is_written_and_begun_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = root / ".agl" / "logs" / "gateway.log"
    steps = iter(
        [
            lambda: file.write_text("g1\ng2\ng3\ncut off\n", encoding="utf-8"),
            lambda: file.write_text("new\n", encoding="utf-8"),
        ]
    )

    def pause(_: float) -> None:
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(logs_module.time, "sleep", pause)
    result = logs(root, "gateway", "-f", "-n", "1")
    assert (result.exit_code, result.stdout) == (130, "g3\ncut off\nnew\n")
