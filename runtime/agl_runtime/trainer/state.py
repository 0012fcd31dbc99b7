"""What of a run is on disk: `run.json`, and the checkpoints.

`run.json` holds the run epoch, which grows with each start of a trainer and is never given out twice, whatever kills
it; and the identity of the run that `agl up` continues. All that a checkpoint stands for is in its own folder, in
`state.json`, which comes and goes with the weights. A folder without a readable one is no checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from agl_runtime.errors import ConfigError, PreconditionError, TrainerError
from agl_runtime.schemas import CheckpointRecord, PolicyVersion
from agl_runtime.trainer.schedule import Group, State, resumed

RUN_FILE = "run.json"
LOCK_FILE = "run/trainer.lock"
CHECKPOINTS = "checkpoints"
STATE_FILE = "state.json"
WRITE_ERRORS = (OSError, ValueError, RuntimeError)  # torch has no errors of its own for files

log = logging.getLogger(__name__)


class Run(BaseModel):
    """`policy` and `seed` are what it began with; `ended` says how it last ended at `steps`, None while it runs."""

    run_id: str
    policy: str
    seed: int
    ended: str | None = None
    steps: int = 0


class RunFile(BaseModel):
    """`epoch` is that of the newest start of any trainer of the project."""

    epoch: int = 0
    run: Run | None = None


class SavedState(BaseModel):
    """The content of `state.json`. `updates` is that of `version`, the name of the weights; `open` has number and
    version of each group under way. `consumed` are the rollouts trained since the checkpoint before it; `line` the
    metrics of the last step, which a crash may keep from their own file."""

    run_id: str
    run_epoch: int
    version: str
    updates: int
    step: int
    next_group: int
    open: list[tuple[int, str]]
    consumed: list[str]
    line: dict[str, Any]

    @classmethod
    def of(cls, run_id: str, run_epoch: int, at: State, consumed: list[str], line: dict[str, Any] | None) -> SavedState:
        return cls(
            run_id=run_id,
            run_epoch=run_epoch,
            version=str(at.version),
            updates=at.version.updates,
            step=at.step,
            next_group=at.next_group,
            open=[(group.number, str(group.version)) for group in at.open],
            consumed=consumed,
            line=line or {},
        )

    def schedule_state(self, validated: int) -> State:
        groups = [Group(number, PolicyVersion.parse(version)) for number, version in self.open]
        return resumed(self.step, PolicyVersion.parse(self.version), self.next_group, groups, validated)

    def record(self, folder: Path) -> CheckpointRecord:
        """What the store is told of it."""
        return CheckpointRecord(
            run_id=self.run_id, version=self.version, step=self.step, path=str(folder), rollout_ids=self.consumed
        )


class Checkpoint(NamedTuple):
    """A whole checkpoint."""

    folder: Path
    version: PolicyVersion
    saved: SavedState


@contextlib.contextmanager
def exclusive(state_dir: Path, patience_s: float = 60.0) -> Iterator[None]:
    """Only one trainer of a project at a time; waits for one that is ending. Raises PreconditionError."""
    file = state_dir / LOCK_FILE
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    give_up_at = time.monotonic() + patience_s
    with file.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > give_up_at:
                    raise PreconditionError("Another trainer runs for this project.", "Stop it first.") from error
                time.sleep(0.1)
        yield


def read_run_file(state_dir: Path) -> RunFile:
    """Rebuilt from the newest checkpoint where it is missing. Raises TrainerError when it is there and broken."""
    file = state_dir / RUN_FILE
    try:
        return RunFile.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return RunFile(epoch=max((found.saved.run_epoch for found in checkpoints(state_dir)), default=0))
    except (OSError, ValidationError) as error:
        raise TrainerError(f"{file} is broken.", "Move the folder .agl aside to begin anew.") from error


def write_run_file(state_dir: Path, content: RunFile) -> None:
    replace_file(state_dir / RUN_FILE, content.model_dump_json())


def replace_file(file: Path, text: str) -> None:
    """All of it or nothing, and on disk when this returns."""
    fresh = file.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    fresh.replace(file)


@contextlib.contextmanager
def placing(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which is flushed to the disk and gets its place when the block ends: it is there whole or
    not at all. Raises TrainerError when it exists or cannot be written; nothing of it then remains."""
    if folder.exists():
        raise TrainerError(f"The checkpoint {folder} exists already.", "Move it away.")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in [*partial.rglob("*"), partial]:
            if not path.is_symlink():
                flush(path)
        partial.rename(folder)
        flush(folder.parent)
    except WRITE_ERRORS as error:
        free_mib = shutil.disk_usage(folder.parent).free / 2**20  # torch says nothing of a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise TrainerError(
            f"The checkpoint {folder} cannot be written, with {free_mib:,.0f} MiB free there: {error}.",
            "Correct that, then resume from the last checkpoint.",
        ) from error


def flush(path: Path) -> None:
    """A file or a folder is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def next_epoch(state_dir: Path) -> int:
    """A run epoch that no trainer of this project had before."""
    content = read_run_file(state_dir)
    write_run_file(state_dir, content.model_copy(update={"epoch": content.epoch + 1}))
    return content.epoch + 1


def open_run(state_dir: Path, policy: str, seed: int) -> Run:
    """The run to continue, or a new one. Raises ConfigError where its checkpoints belong to another policy or seed.

    A run that ended without signal has learnt nothing and is not continued: what its settings were is why it ended.
    """
    content = read_run_file(state_dir)
    run = content.run
    begun = run is not None and newest_checkpoint(state_dir, run.run_id) is not None
    if run is not None and begun and (run.policy, run.seed) != (policy, seed):
        raise ConfigError(
            f"Run {run.run_id} began with model.path {run.policy} and train.seed {run.seed}; now they are {policy} "
            f"and {seed}.",
            "Put them back to continue it, or move the folder .agl aside to begin a new run.",
        )
    if run is None or (run.policy, run.seed) != (policy, seed) or run.ended == "no_signal":
        run = Run(run_id=f"r{secrets.token_hex(4)}", policy=policy, seed=seed)
        write_run_file(state_dir, RunFile(epoch=content.epoch, run=run))
    return run


def close_run(state_dir: Path, run: Run, ended: str, steps: int) -> None:
    """Note how the run ended."""
    closed = run.model_copy(update={"ended": ended, "steps": steps})
    write_run_file(state_dir, RunFile(epoch=read_run_file(state_dir).epoch, run=closed))


def checkpoint_folder(state_dir: Path, version: PolicyVersion) -> Path:
    return state_dir / CHECKPOINTS / str(version)


def checkpoints(state_dir: Path) -> list[Checkpoint]:
    """Every whole checkpoint, oldest first: a later run epoch goes on from what earlier ones made."""
    found = (_read_checkpoint(file) for file in (state_dir / CHECKPOINTS).glob(f"*/{STATE_FILE}") if _is_placed(file))
    return sorted((item for item in found if item is not None), key=lambda item: item.version)


def newest_checkpoint(state_dir: Path, run_id: str | None = None) -> Checkpoint | None:
    """Of one run, or of any."""
    return next((item for item in reversed(checkpoints(state_dir)) if run_id in (None, item.saved.run_id)), None)


def note_steps(folder: Path, saved: SavedState) -> SavedState:
    """Steps without an update followed a checkpoint: from now on it stands for where the run is after them."""
    before = SavedState.model_validate_json((folder / STATE_FILE).read_bytes())
    whole = saved.model_copy(update={"consumed": before.consumed + saved.consumed})
    replace_file(folder / STATE_FILE, whole.model_dump_json())
    return whole


def prune_checkpoints(state_dir: Path, run_id: str, keep: int) -> None:
    """Delete the oldest of the run beyond `keep`; a deletion cut short leaves no whole checkpoint behind."""
    own = [item for item in checkpoints(state_dir) if item.saved.run_id == run_id]
    for item in own[:-keep]:
        (item.folder / STATE_FILE).unlink()
        shutil.rmtree(item.folder)


def _is_placed(file: Path) -> bool:
    """Not one that was still being written beside its place."""
    return re.fullmatch(r"\d+\.\d+", file.parent.name) is not None


def _read_checkpoint(file: Path) -> Checkpoint | None:
    try:
        saved = SavedState.model_validate_json(file.read_bytes())
        return Checkpoint(file.parent, PolicyVersion.parse(saved.version), saved)
    except (OSError, ValueError) as error:
        log.warning("%s is no whole checkpoint (%s) and is left alone", file.parent, type(error).__name__)
        return None
