from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agl_cli.main import app
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.estimate import count_parameters
from agl_runtime.trainer.schedule import State
from agl_runtime.trainer.state import SavedState, checkpoint_folder
from fakes.projects import make_model_folder, make_project


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    make_project(root)
    for updates in (1, 2):
        version = PolicyVersion(1, updates)
        folder = checkpoint_folder(root / ".agl", version)
        (folder / "verl").mkdir(parents=True)
        make_model_folder(folder, (updates,))
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
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert count_parameters(tmp_path / "out") == 2


def test_an_older_checkpoint_is_named_by_its_version(project: Path, tmp_path: Path) -> None:
    assert export(project, str(tmp_path / "out"), "--version", "1.1")[0] == 0
    assert count_parameters(tmp_path / "out") == 1


@pytest.mark.parametrize(
    ("dtype", "said", "told"),
    [
        ("F32", {"dtype": "bfloat16"}, {"dtype": "float32"}),
        ("BF16", {"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        (
            "F32",
            {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "vocab_size": 3}},
            {"dtype": "float32", "text_config": {"dtype": "float32", "vocab_size": 3}},
        ),
        ("F8_E4M3", {"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    ],
)
def test_config_tells_of_what_type_the_weights_are(
    project: Path, tmp_path: Path, dtype: str, said: dict[str, Any], told: dict[str, Any]
) -> None:
    folder = checkpoint_folder(project / ".agl", PolicyVersion(1, 2))
    weights = folder / "model.safetensors"
    header = {"few": {"dtype": "F16", "shape": [1]}, "most": {"dtype": dtype, "shape": [2]}}
    content = json.dumps(header).encode()
    weights.write_bytes(struct.pack("<Q", len(content)) + content)
    (folder / "config.json").write_text(json.dumps(said))
    assert export(project, str(tmp_path / "out"))[0] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == told
    assert json.loads((folder / "config.json").read_text()) == said


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
