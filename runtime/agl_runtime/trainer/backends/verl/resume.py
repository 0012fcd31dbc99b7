"""verl's folder behind a checkpoint of agl's: linked when it is written, looked at before a run resumes from it.

What is wrong with it verl tells only minutes later, in torch's words, or not at all: without `data.pt` the order of the
tasks would begin anew.
"""

from __future__ import annotations

import math
import os
import re
import zipfile
from pathlib import Path

import torch

from agl_runtime.config import TrainConfig
from agl_runtime.errors import ConfigError, TrainerError
from agl_runtime.trainer import state

NEW_RUN = "or `agl export` the policy and begin a new run with it."
VERL_LINK = "verl"
"""In a checkpoint: the link to the folder that verl wrote."""


def link_verl(checkpoint: Path, written: Path) -> None:
    """`written` is on disk when this returns. The link is relative: a project that was moved or copied keeps to its
    own."""
    for path in [*written.rglob("*"), written]:
        state.flush(path)
    (checkpoint / VERL_LINK).symlink_to(os.path.relpath(written.resolve(), checkpoint.resolve()))


def verl_folder(newest: state.Checkpoint | None, train: TrainConfig) -> Path | None:
    """Where verl resumes. Raises TrainerError for a checkpoint of another backend or one that lost files, ConfigError
    for one of another number of ranks, whose shards no others can read, of another learning rate, which verl would go
    on with, or of more groups under way than there may be now, which verl would lose or keep."""
    if newest is None:
        return None
    link = newest.folder / VERL_LINK
    if not link.is_symlink():
        raise TrainerError(
            f"The checkpoint {newest.folder} was not written by verl.",
            "Set train.backend back, or move the folder .agl aside to begin a new run.",
        )
    folder = link.resolve()
    for file in [folder / "data.pt", *folder.rglob("*.pt")]:
        if not zipfile.is_zipfile(file):  # as torch writes them
            raise TrainerError(
                f"The checkpoint file {file} is lost or damaged.",
                f"Remove {newest.folder} to resume from an earlier checkpoint.",
            )
    names = [file.name for file in (folder / "actor").glob("*.pt")]
    worlds = {int(found[1]) for name in names if (found := re.match(r"model_world_size_(\d+)_rank_", name))}
    if worlds and (ranks := train.gpus * train.nodes) not in worlds:
        raise ConfigError(
            f"The checkpoint {newest.folder} was written with {worlds.pop()} as train.gpus times train.nodes, which is "
            f"now {ranks}.",
            f"Put train.gpus and train.nodes back, {NEW_RUN}",
        )
    for lr in _rates(folder):
        if not math.isclose(lr, train.lr):
            raise ConfigError(
                f"verl would go on with the learning rate of the checkpoint {newest.folder}, {lr:g}, and train.lr is "
                f"{train.lr:g}.",
                f"Put train.lr back, {NEW_RUN}",
            )
    under_way = len(newest.saved.open)
    if under_way and under_way + train.groups_per_step > (train.active_groups or train.groups_per_step):
        raise ConfigError(
            f"{under_way} groups were under way at the checkpoint {newest.folder}, more than train.active_groups "
            "leaves room for beside a batch.",
            f"Set train.active_groups to {under_way + train.groups_per_step} or more, {NEW_RUN}",
        )
    return folder


def _rates(folder: Path) -> list[float]:
    """As the FSDP engine saves them; they are in no file of Megatron's that torch alone can read."""
    files = (folder / "actor").glob("extra_state_world_size_*_rank_0.pt")
    schedules = [torch.load(file, weights_only=False).get("lr_scheduler") for file in files]
    return [lr for schedule in schedules for lr in (schedule or {}).get("base_lrs", ())]
