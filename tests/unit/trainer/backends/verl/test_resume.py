from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from agl_runtime.config import TrainConfig
from agl_runtime.errors import ConfigError, TrainerError
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.verl.resume import link_verl, verl_folder
from agl_runtime.trainer.state import Checkpoint, SavedState

SAVED = SavedState(
    run_id="r1", run_epoch=1, version="1.2", updates=2, step=2, next_group=4, open=[], consumed=[], line={}
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """With a checkpoint of one process of verl's."""
    root = tmp_path / "project"
    actor = root / "verl" / "global_step_2" / "actor"
    for file in (
        actor / "model_world_size_1_rank_0.pt",
        actor / "optim_world_size_1_rank_0.pt",
        actor.parent / "data.pt",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"a": torch.zeros(99)}, file)
    torch.save({"lr_scheduler": {"base_lrs": [1e-3]}}, actor / "extra_state_world_size_1_rank_0.pt")
    (root / "checkpoints" / "1.2").mkdir(parents=True)
    link_verl(root / "checkpoints" / "1.2", actor.parent)
    return root


def found(project: Path, saved: SavedState = SAVED, **train: Any) -> Path | None:
    settings = TrainConfig(**{"backend": "verl", "lr": 1e-3, **train})
    return verl_folder(Checkpoint(project / "checkpoints" / "1.2", PolicyVersion(1, 2), saved), settings)


def test_a_new_run_has_no_folder() -> None:
    assert verl_folder(None, TrainConfig()) is None


def test_a_project_that_was_moved_keeps_to_its_own_folder(project: Path, tmp_path: Path) -> None:
    assert found(project) == project / "verl" / "global_step_2"
    moved = shutil.move(project, tmp_path / "moved")
    assert found(moved) == moved / "verl" / "global_step_2"


def test_a_checkpoint_of_another_backend_is_refused(project: Path) -> None:
    (project / "checkpoints" / "1.2" / "verl").unlink()
    with pytest.raises(TrainerError, match=r"1\.2 was not written by verl\. Set train\.backend back"):
        found(project)


@pytest.mark.parametrize(
    "name", ["data.pt", "actor/model_world_size_1_rank_0.pt", "actor/optim_world_size_1_rank_0.pt"]
)
def test_a_file_that_was_cut_off_is_named(project: Path, name: str) -> None:
    file = project / "verl" / "global_step_2" / name
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TrainerError, match=rf"{name} is lost or damaged\. Remove .*1\.2 to resume from an earlier"):
        found(project)


def test_a_folder_that_is_gone_is_told(project: Path) -> None:
    shutil.rmtree(project / "verl")
    with pytest.raises(TrainerError, match=r"data\.pt is lost or damaged\."):
        found(project)


def test_another_number_of_gpus_is_refused(project: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"with 1 as train\.gpus times train\.nodes, which is now 2\. Put train\.gpus and"
    ):
        found(project, gpus=2)


def test_another_learning_rate_which_verl_would_not_take_is_refused(project: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"of the checkpoint .*1\.2, 0\.001, and train\.lr is 0\.0005\. Put train\.lr back"
    ):
        found(project, lr=5e-4)


@pytest.mark.parametrize(("active", "batch"), [(None, 2), (4, 2), (8, 4)])
def test_fewer_active_groups_than_are_under_way_are_refused(project: Path, active: int | None, batch: int) -> None:
    saved = SAVED.model_copy(update={"open": [(n, "1.2") for n in range(6)]})
    message = rf"6 groups were under way .* Set train\.active_groups to {6 + batch} or more"
    with pytest.raises(ConfigError, match=message):
        found(project, saved, active_groups=active, groups_per_step=batch)
    assert found(project, saved, active_groups=6 + batch, groups_per_step=batch) is not None
    assert found(project, active_groups=active, groups_per_step=batch) is not None
