from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agl_cli.main import app
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.schedule import State
from agl_runtime.trainer.state import SavedState, checkpoint_folder
from fakes.projects import make_project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    make_project(root)
    for updates in (1, 2):
        version = PolicyVersion(1, updates)
        folder = checkpoint_folder(root / ".agl", version)
        (folder / "verl").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes([updates]))
        (folder / "trainer.pt").write_bytes(b"optimizer")
        saved = SavedState.of("r1", 1, State(step=updates, version=version), [], None)
        (folder / "state.json").write_text(saved.model_dump_json())
    return root


def export(project: Path, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *arguments, "--project", str(project)])
    return result.exit_code, result.output


def test_the_newest_checkpoints_policy_is_written_without_what_only_training_needs(
    project: Path, tmp_path: Path
) -> None:
    code, said = export(project, str(tmp_path / "out"), "--json")
    assert (code, json.loads(said)) == (0, {"version": "1.2", "step": 2, "folder": str(tmp_path / "out")})
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"\2"


def test_an_older_checkpoint_is_named_by_its_version(project: Path, tmp_path: Path) -> None:
    assert export(project, str(tmp_path / "out"), "--version", "1.1")[0] == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"\1"


def test_an_unknown_version_names_those_that_there_are(project: Path, tmp_path: Path) -> None:
    code, said = export(project, str(tmp_path / "out"), "--version", "9.9")
    assert code == 2
    assert "There is no checkpoint 9.9." in said
    assert "1.1, 1.2" in said
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_left_as_it_is(project: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    code, said = export(project, str(tmp_path / "out"))
    assert code == 2
    assert "exists already" in said
