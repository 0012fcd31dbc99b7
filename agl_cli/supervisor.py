"""Starts the parts of a run as child processes, keeps them alive, and stops them in order.

Each part runs in its own session (a Ctrl-C on the terminal reaches only the supervisor), appends to
`.agl/logs/<part>.log`, and holds the read end of a pipe whose other end only this process has: when this process is
gone, however it ended, the part reads end-of-file and stops by itself.

A part that dies is started again after a growing pause, a few times; not so one that ends with exit code 2 or 3 (wrong
configuration, missing precondition), or twice with the same error. That is decided by `after_exit`, which is pure.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from agl_cli import diagnostics
from agl_cli.runstate import ProcessId, private_folder
from agl_runtime.part import GATEWAY_FILE

STOP_ORDER = ("controller", "trainer", "gateway")
LOG_LIMIT_BYTES = 16 * 2**20
HEALTHY_S = 900.0  # a part that lived longer has not died of what its last start began with
FIRST_PAUSE_S = 0.5
MOST_DEATHS = 4
STOP_GRACE_S = 60.0
GRACE_WITHOUT_GATEWAY_S = 10.0  # the others then call it in vain; killing a part loses nothing


@dataclass(frozen=True, slots=True)
class PartCommand:
    """`once` marks a part whose exit with code 0 ends the run, such as the trainer."""

    name: str
    argv: tuple[str, ...]
    once: bool = False


@dataclass(frozen=True, slots=True)
class PartEnd:
    """A part that ended for good. `error` is the last error line of its log."""

    name: str
    code: int
    error: str | None = None


def part_command(name: str, root: Path, settings: Sequence[str], *extra: str, once: bool = False) -> PartCommand:
    sets = [word for item in settings for word in ("--set", item)]
    argv = (sys.executable, "-m", f"agl_runtime.{name}", "--root", str(root), "--with-parent", *extra, *sets)
    return PartCommand(name, argv, once)


def after_exit(code: int, deaths: int, *, same_error: bool = False) -> float | None:
    """Seconds until a part that ended unasked is started again; None when it must not be. `deaths` counts this one;
    `same_error` says that the one before was of the same error."""
    if code in (diagnostics.USAGE, diagnostics.MISSING) or same_error or deaths >= MOST_DEATHS:
        return None
    return float(FIRST_PAUSE_S * 2 ** (deaths - 1))


@dataclass(slots=True)
class _Child:
    process: asyncio.subprocess.Process
    started: float = field(default_factory=time.monotonic)

    def signal(self, number: int) -> None:
        """Only ever meets our own child: its pid is not reaped, and so not given away, before `returncode` is set."""
        if self.process.returncode is None:
            self.process.send_signal(number)

    def kill_tree(self) -> None:
        if self.process.returncode is not None:
            return
        try:
            tree = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            tree = []
        self.signal(signal.SIGKILL)
        for process in tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


class Supervisor:
    """`notify` gets a line when a part dies and is started again; `record` the processes whenever they change."""

    def __init__(
        self,
        state_dir: Path,
        commands: Sequence[PartCommand],
        *,
        notify: Callable[[str], None],
        record: Callable[[Mapping[str, ProcessId]], None],
    ) -> None:
        self._state_dir = state_dir
        self._commands = {command.name: command for command in commands}
        self._notify = notify
        self._record = record
        self._children: dict[str, _Child] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._ended: asyncio.Future[PartEnd] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        private_folder(self._state_dir, "logs")
        (self._state_dir / GATEWAY_FILE).unlink(missing_ok=True)  # where an earlier gateway listened
        for command in self._commands.values():
            self._tasks[command.name] = asyncio.create_task(self._keep(command))
            self._tasks[command.name].add_done_callback(self._surface)

    async def ended(self) -> PartEnd:
        """The first part that ended for good: done, or failed beyond another start."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Ask the parts to stop, one after the other; one that does not within `grace_s` is killed."""
        self._stopping.set()
        if self._ended.done() and self._ended.exception() is None and self._ended.result().name == "gateway":
            grace_s = min(grace_s, GRACE_WITHOUT_GATEWAY_S)
        for name in STOP_ORDER:
            task = self._tasks.get(name)
            if task is None:
                continue
            self._signal(name, signal.SIGTERM)
            done, _ = await asyncio.wait([task], timeout=grace_s)
            if not done and name in self._children:
                self._notify(f"{name} did not stop within {grace_s:.0f} s and is killed")
                self._children[name].kill_tree()
                await asyncio.wait([task])

    def kill(self) -> None:
        """End every part and what it started, now. `stop` then returns at once."""
        self._stopping.set()
        for child in self._children.values():
            child.kill_tree()

    def _surface(self, task: asyncio.Task[None]) -> None:
        """A part that could not even be started ends the run with what was raised."""
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _signal(self, name: str, number: int) -> None:
        if name in self._children:
            self._children[name].signal(number)

    async def _keep(self, command: PartCommand) -> None:
        deaths, earlier = 0, None
        while not self._stopping.is_set():
            log_file = self._state_dir / "logs" / f"{command.name}.log"
            offset = _rotated_size(log_file)
            child = await self._spawn(command, log_file)
            code = await child.process.wait()
            if self._stopping.is_set():
                return
            deaths = 1 if time.monotonic() - child.started > HEALTHY_S else deaths + 1
            error = last_error(log_file, offset) if code > 0 else None
            same_error = error is not None and error == earlier
            pause_s = None if command.once and code == 0 else after_exit(code, deaths, same_error=same_error)
            earlier = error
            if pause_s is None:
                if not self._ended.done():
                    self._ended.set_result(PartEnd(command.name, code, error))
                return
            self._notify(f"{command.name} died ({_cause(code)}{f': {error}' if error else ''}); starting it again")
            await self._pause(pause_s)

    async def _spawn(self, command: PartCommand, log_file: Path) -> _Child:
        with log_file.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        child = _Child(process)
        self._children[command.name] = child
        if self._stopping.is_set():
            child.signal(signal.SIGTERM)
        self._record(self._processes())
        return child

    def _processes(self) -> dict[str, ProcessId]:
        found = {}
        for name, child in self._children.items():
            try:
                found[name] = ProcessId.of(child.process.pid)
            except psutil.NoSuchProcess:
                continue
        return found

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):  # Python 3.11's wait_for can swallow a cancellation
                await self._stopping.wait()
        except TimeoutError:
            return


def _rotated_size(log_file: Path) -> int:
    """Size of the log before a start; a long one is moved aside first."""
    try:
        size = log_file.stat().st_size
    except FileNotFoundError:
        return 0
    if size < LOG_LIMIT_BYTES:
        return size
    log_file.replace(log_file.with_suffix(".log.1"))
    return 0


def last_error(log_file: Path, offset: int) -> str | None:
    """The last line at level ERROR since `offset`, or else the last line: of an uncaught exception, its message."""
    with log_file.open("rb") as log:
        log.seek(offset)
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    for line in reversed(lines):
        _, marker, message = line.partition(" ERROR ")
        if marker:
            return message.strip().partition(": ")[2]
    return lines[-1].strip() if lines else None


def _cause(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
