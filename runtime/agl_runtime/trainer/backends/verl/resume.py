"""verl's folder behind a checkpoint of agl's: linked when it is written, looked at before a run resumes from it.

What is wrong with it verl tells only minutes later, in torch's words, or not at all: without `data.pt` the order of the
tasks would begin anew.
"""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

from agl_runtime.errors import ConfigError, TrainerError
from agl_runtime.trainer import state

VERL_LINK = "verl"
"""In a checkpoint: the link to the folder that verl wrote."""


def link_verl(checkpoint: Path, written: Path) -> None:
    """`written` is on disk when this returns. The link is relative: a project that was moved or copied keeps to its
    own."""
    for path in [*written.rglob("*"), written]:
        state.flush(path)
    (checkpoint / VERL_LINK).symlink_to(os.path.relpath(written.resolve(), checkpoint.resolve()))


def verl_folder(newest: state.Checkpoint | None, ranks: int) -> Path | None:
    """Where verl resumes. Raises TrainerError for a checkpoint of another backend or one that lost files, ConfigError
    for one of another number of ranks, whose shards no others can read."""
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
    if worlds and ranks not in worlds:
        raise ConfigError(
            f"The checkpoint {newest.folder} was written by {worlds.pop()} GPUs, and now there are {ranks}.",
            "Put train.gpus and train.nodes back, or `agl export` the policy and begin a new run with it.",
        )
    return folder
