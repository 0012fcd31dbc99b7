"""Who runs this project's parts: one agl command at a time, held by a file lock and described in `.agl/run/up.json`.

The lock is the kernel's, so it goes with its holder however that ends. The description outlives a holder that was
killed; it counts only while its holder lives. A process is known by pid and creation time, so that a signal never
meets another process that was given the same pid.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

from agl_runtime.errors import PreconditionError
from agl_runtime.part import make_state_dir, writing

LOCK_NAME = "lock"
RECORD_FILE = "run/up.json"
END_PATIENCE_S = 240.0  # each of three parts may take its grace
CREATED_SLACK_S = 1.0  # creation times may be told with a rounding


@dataclass(frozen=True, slots=True)
class ProcessId:
    pid: int
    created: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Raises psutil.NoSuchProcess."""
        return cls(pid, _created(psutil.Process(pid)))

    def process(self) -> psutil.Process | None:
        """The process itself while it lives."""
        try:
            found = psutil.Process(self.pid)
            alive = abs(_created(found) - self.created) < CREATED_SLACK_S and found.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return found if alive else None


def _created(process: psutil.Process) -> float:
    """When it began, by a clock that nobody sets: clock ticks since the boot where the kernel tells them. Raises
    psutil.NoSuchProcess."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # another system, or a process that is gone
        return float(process.create_time())
    return float(stat.rpartition(")")[2].split()[19])


@dataclass(frozen=True, slots=True)
class Record:
    """`command` is the agl command that holds the project; `parts` are the processes that it supervises."""

    command: str
    holder: ProcessId
    started_at: float
    parts: dict[str, ProcessId] = field(default_factory=dict)


class RunLock:
    """Held by the command that supervises the parts. Raises PreconditionError when another one holds it, or the state
    folder cannot be written."""

    def __init__(self, state_dir: Path, command: str, *, patience_s: float = 5.0) -> None:
        self._state_dir = state_dir
        self._patience_s = patience_s
        self._record = Record(command, ProcessId.of(os.getpid()), time.time())
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        file = private_folder(self._state_dir, "run") / LOCK_NAME
        with writing(self._state_dir):
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        give_up_at = time.monotonic() + self._patience_s
        while not _lock(handle):
            if time.monotonic() > give_up_at:
                os.close(handle)
                raise _held(read_record(self._state_dir))
            time.sleep(0.1)
        self._file = handle
        with contextlib.ExitStack() as undo:
            undo.callback(self.__exit__)
            if (left := left_record(self._state_dir)) is not None:
                _end([], _alive(left.parts.values()))  # what a killed holder started is on its way out
            self.record({})
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            (self._state_dir / RECORD_FILE).unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def record(self, parts: Mapping[str, ProcessId]) -> None:
        """Say which processes are supervised now."""
        value = asdict(replace(self._record, parts=dict(parts)))
        file = self._state_dir / RECORD_FILE
        fresh = file.with_suffix(".new")
        with writing(self._state_dir):
            fresh.write_text(json.dumps(value), encoding="utf-8")
            fresh.replace(file)


def private_folder(state_dir: Path, name: str) -> Path:
    """A folder in the state folder; both are for their owner only. Raises PreconditionError."""
    with writing(state_dir):
        make_state_dir(state_dir)
        (state_dir / name).mkdir(mode=0o700, exist_ok=True)
    return state_dir / name


def read_record(state_dir: Path) -> Record | None:
    """Who holds the project, or None. A record whose holder died is none, even if its parts are still ending."""
    record = left_record(state_dir)
    return record if record is not None and record.holder.process() is not None else None


def refuse_second(state_dir: Path) -> None:
    """Raises PreconditionError when a command holds the project."""
    if (record := read_record(state_dir)) is not None:
        raise _held(record)


def left_record(state_dir: Path) -> Record | None:
    """The record as it stands in the file, its holder alive or not."""
    try:
        raw = json.loads((state_dir / RECORD_FILE).read_text(encoding="utf-8"))
        parts = {name: ProcessId(**value) for name, value in raw["parts"].items()}
        return Record(raw["command"], ProcessId(**raw["holder"]), raw["started_at"], parts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def end(record: Record) -> bool | None:
    """Ask the holder, or parts that outlived it, to stop, and wait for all of them. None when none was alive, False
    when some did not stop."""
    return _end(_alive([record.holder]), _alive(record.parts.values()))


def _end(holder: list[psutil.Process], parts: list[psutil.Process]) -> bool | None:
    for process in holder or parts:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    still = psutil.wait_procs(holder + parts, timeout=END_PATIENCE_S)[1]
    return not still if holder or parts else None


def _alive(known: Iterable[ProcessId]) -> list[psutil.Process]:
    return [process for item in known if (process := item.process()) is not None]


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _held(record: Record | None) -> PreconditionError:
    if record is None:
        return PreconditionError(
            "Another agl command is using this project.", "Wait for it to end, or see `agl status`."
        )
    return PreconditionError(
        f"`agl {record.command}` (process {record.holder.pid}) is using this project.",
        "Wait for it to end, or stop it with `agl down`.",
    )
