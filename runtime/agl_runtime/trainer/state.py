"""What of a run is on disk: `run.json`, and the checkpoints.

`run.json` holds the run epoch, which grows with each start of a trainer and is never given out twice, whatever kills
it; and the identity of the run that `agl up` continues. All that a checkpoint stands for is in its own folder, in
`state.json`, which comes and goes with the weights. A folder without a readable one is no checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agl_runtime.errors import ConfigError, PreconditionError, TrainerError
from agl_runtime.schemas import CheckpointRecord, PolicyVersion
from agl_runtime.trainer.schedule import Group, State, resumed

RUN_FILE = "run.json"
LOCK_FILE = "run/trainer.lock"
CHECKPOINTS = "checkpoints"
STATE_FILE = "state.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """`policy` and `seed` are what it began with; `ended` says how it last ended at `steps`, None while it runs."""

    run_id: str
    policy: str
    seed: int
    ended: str | None = None
    steps: int = 0


@dataclass(frozen=True, slots=True)
class RunFile:
    """`epoch` is that of the newest start of any trainer of the project."""

    epoch: int = 0
    run: Run | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint. `record` is what the store is told of it, `line` the metrics of the step that it ended."""

    folder: Path
    run_id: str
    run_epoch: int
    version: PolicyVersion
    step: int
    next_group: int
    open: tuple[Group, ...]
    record: CheckpointRecord
    line: dict[str, Any]

    def schedule_state(self, validated: int) -> State:
        return resumed(self.step, self.version, self.next_group, self.open, validated)


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
        raw = json.loads(file.read_text(encoding="utf-8"))
        return RunFile(int(raw["epoch"]), Run(**raw["run"]) if raw["run"] else None)
    except FileNotFoundError:
        return RunFile(max((found.run_epoch for found in checkpoints(state_dir)), default=0))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainerError(f"{file} is broken.", "Move the folder .agl aside to begin anew.") from error


def write_run_file(state_dir: Path, content: RunFile) -> None:
    replace_file(state_dir / RUN_FILE, json.dumps(asdict(content)))


def replace_file(file: Path, text: str) -> None:
    """All of it or nothing, and on disk when this returns."""
    fresh = file.with_suffix(".new")
    with fresh.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    fresh.replace(file)


def next_epoch(state_dir: Path) -> int:
    """A run epoch that no trainer of this project had before."""
    content = read_run_file(state_dir)
    write_run_file(state_dir, replace(content, epoch=content.epoch + 1))
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
        run = Run(f"r{secrets.token_hex(4)}", policy, seed)
        write_run_file(state_dir, replace(content, run=run))
    return run


def close_run(state_dir: Path, run: Run, ended: str, steps: int) -> None:
    """Note how the run ended."""
    write_run_file(state_dir, replace(read_run_file(state_dir), run=replace(run, ended=ended, steps=steps)))


def checkpoint_state(
    run_id: str, run_epoch: int, state: State, consumed: Sequence[str], line: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `state.json`, which `checkpoints` reads. `consumed` are the rollouts trained since the checkpoint
    before it, `line` the metrics of the last step, which a crash may keep from their own file."""
    return {
        "run_id": run_id,
        "run_epoch": run_epoch,
        "version": str(state.version),
        "updates": state.version.updates,
        "step": state.step,
        "next_group": state.next_group,
        "open": [[group.number, str(group.version)] for group in state.open],
        "consumed": list(consumed),
        "line": dict(line),
    }


def record_of(folder: Path, content: Mapping[str, Any]) -> CheckpointRecord:
    return CheckpointRecord(
        run_id=content["run_id"],
        version=content["version"],
        step=content["step"],
        path=str(folder),
        rollout_ids=content["consumed"],
    )


def checkpoint_folder(state_dir: Path, version: PolicyVersion) -> Path:
    return state_dir / CHECKPOINTS / str(version)


def checkpoints(state_dir: Path) -> list[Checkpoint]:
    """Every whole checkpoint, oldest first: a later run epoch goes on from what earlier ones made."""
    found = (_read_checkpoint(file) for file in (state_dir / CHECKPOINTS).glob(f"[0-9]*.*/{STATE_FILE}"))
    return sorted((item for item in found if item is not None), key=lambda item: item.version)


def newest_checkpoint(state_dir: Path, run_id: str | None = None) -> Checkpoint | None:
    """Of one run, or of any."""
    return next((item for item in reversed(checkpoints(state_dir)) if run_id in (None, item.run_id)), None)


def prune_checkpoints(state_dir: Path, run_id: str, keep: int) -> None:
    """Delete the oldest of the run beyond `keep`; a deletion cut short leaves no whole checkpoint behind."""
    own = [item for item in checkpoints(state_dir) if item.run_id == run_id]
    for item in own[:-keep]:
        (item.folder / STATE_FILE).unlink()
        shutil.rmtree(item.folder)


def _read_checkpoint(file: Path) -> Checkpoint | None:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw["version"] != file.parent.name:
            raise ValueError("still being written")
        return Checkpoint(
            folder=file.parent,
            run_id=raw["run_id"],
            run_epoch=raw["run_epoch"],
            version=PolicyVersion.parse(raw["version"]),
            step=raw["step"],
            next_group=raw["next_group"],
            open=tuple(Group(number, PolicyVersion.parse(version)) for number, version in raw["open"]),
            record=record_of(file.parent, raw),
            line=raw["line"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s is no whole checkpoint (%s) and is left alone", file.parent, type(error).__name__)
        return None
