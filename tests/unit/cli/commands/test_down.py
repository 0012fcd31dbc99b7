from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from agl_cli.main import app
from fakes.projects import make_project

HOLDER = """
import pathlib, sys
from agl_cli.runstate import RunLock
with RunLock(pathlib.Path(sys.argv[1]), "up"):
    print("held", flush=True)
    input()
"""


def test_nothing_to_stop(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    result = CliRunner().invoke(app, ["down", "--project", str(root)], catch_exceptions=False)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "Nothing runs here.\n")


def test_what_runs_is_stopped_by_its_recorded_process(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    command = [sys.executable, "-c", HOLDER, str(root / ".agl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        result = CliRunner().invoke(app, ["down", "--project", str(root)], catch_exceptions=False)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", "Stopped `agl up`.\n")
        holder.wait(timeout=10)
