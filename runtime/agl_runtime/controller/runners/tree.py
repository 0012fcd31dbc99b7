"""One started command with everything that it starts: its output kept and capped, its end awaited, no process left.

The output is read as fast as it comes, also past what is kept, so a command is never blocked by it and costs no memory.
In a sandbox the kernel ends the whole tree with its first process. Without one, the tree's processes are found by
session, by descent and by a marker in their environment, which a process keeps through setsid and double forks.

The process is reaped here and nowhere else, in the event loop's thread, so a signal never meets a reused pid.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from agl_runtime.controller.runners.base import Kept
from agl_runtime.controller.runners.environment import TREE_VARIABLE
from agl_runtime.errors import RunnerError

CHUNK_BYTES = 256 * 1024
POLL_S = 0.02
SANDBOX_END_S = 2.0
KILL_ROUNDS = 200
KILL_PAUSE_S = 0.01
LAST_READS = 64  # more than a pipe holds: an escaped writer cannot keep `end` busy
STATUS_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Command:
    """`notes` is a folder for `stdout` and `stderr`, of each of which `keep_bytes` are kept. The environment must hold
    TREE_VARIABLE with a value of its own. A `sandboxed` command is told by its standard input where to report."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    notes: Path
    keep_bytes: int
    sandboxed: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """`status` is what waitpid gave, `report` what the sandbox wrote."""

    status: int
    report: bytes
    duration_s: float
    cpu_s: float
    max_rss_mb: float
    stdout: Kept
    stderr: Kept


class _Drain:
    """Reads one stream to its end: the beginning into a file, the rest into a count."""

    def __init__(self, file: Path, keep_bytes: int) -> None:
        self._file = file.open("w+b", buffering=0)
        self._keep = keep_bytes
        self.error: OSError | None = None
        self._size = 0
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._read)

    def _read(self) -> bool:
        """False when nothing more is there now."""
        try:
            data = os.read(self._read_end, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._read_end)
            return False
        room = self._keep - self._size
        if room > 0 and self.error is None:
            try:
                self._file.write(data[:room])
            except OSError as error:  # the disk is full: read on, so that the command is not blocked
                self.error = error
        self._size += len(data)
        return True

    def close(self) -> Kept:
        """Take what is still in the pipe; its writers are dead."""
        for _ in range(LAST_READS):
            if not self._read():
                break
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        with self._file as file:
            file.seek(0)
            return Kept(file.read().decode(errors="replace"), self._size)


class Tree:
    """Start with `Tree.start`; then `wait`, and in every case `end`."""

    def __init__(self, command: Command, process: subprocess.Popen[bytes], report: int, drains: list[_Drain]) -> None:
        self._command = command
        self._process = process
        self._report = report
        self._drains = drains
        self._began = time.monotonic()
        self._over = False

    @classmethod
    def start(cls, command: Command) -> Tree:
        """Raises RunnerError."""
        report, report_to = os.pipe()
        drains = [_Drain(command.notes / name, command.keep_bytes) for name in ("stdout", "stderr")]
        try:
            process = subprocess.Popen(
                command.argv,
                env=command.env,
                cwd=command.cwd,
                stdin=report_to if command.sandboxed else subprocess.DEVNULL,
                stdout=drains[0].write_end,
                stderr=drains[1].write_end,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            for drain in drains:
                os.close(drain.write_end)
                drain.close()
            os.close(report)
            raise RunnerError(
                f"{command.argv[0]} cannot be started: {error}.",
                "Start it by hand; long texts belong in {task_file}.",
            ) from error
        finally:
            os.close(report_to)
        for drain in drains:
            os.close(drain.write_end)
        return cls(command, process, report, drains)

    async def wait(self) -> None:
        """Until the first process has ended. It is not reaped yet."""
        try:
            handle = os.pidfd_open(self._process.pid)
        except (AttributeError, OSError):  # not Linux, or an old one
            while psutil.Process(self._process.pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(POLL_S)
            self._over = True
            return
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
            self._over = True
        finally:
            loop.remove_reader(handle)
            os.close(handle)

    async def end(self) -> Ended:
        """Kill what is still alive of the tree, wait until nothing is, and say what there was. Raises RunnerError."""
        if not self._command.sandboxed:
            mark = self._command.env[TREE_VARIABLE]
            await asyncio.to_thread(kill_marked, lambda value: value == mark, self._process.pid)
        elif not self._over:
            await self._end_sandbox()
        await self.wait()
        _, status, usage = os.wait4(self._process.pid, 0)
        duration_s = time.monotonic() - self._began
        self._process.returncode = os.waitstatus_to_exitcode(status)
        stdout, stderr = (drain.close() for drain in self._drains)
        with os.fdopen(self._report, "rb") as report:
            said = report.read(STATUS_BYTES)
        for drain in self._drains:
            if drain.error is not None:
                raise RunnerError(f"Output in {self._command.notes} cannot be kept: {drain.error}.", "Check the disk.")
        rss_unit = 1 if sys.platform == "darwin" else 1024
        max_rss_mb = usage.ru_maxrss * rss_unit / 2**20
        return Ended(status, said, duration_s, usage.ru_utime + usage.ru_stime, max_rss_mb, stdout, stderr)

    async def _end_sandbox(self) -> None:
        """Kill the namespace's first process, so that the sandbox still accounts for it; then the sandbox itself."""
        for inner in _children(self._process.pid):
            _kill(inner)
        try:
            async with asyncio.timeout(SANDBOX_END_S):
                await self.wait()
        except TimeoutError:
            self._process.kill()


def kill_marked(is_ours: Callable[[str], bool], session: int | None = None) -> None:
    """Kill every process of the session or with a mark that `is_ours`, and what these started; repeated until none is
    left. Blocks. Raises RunnerError when some survive."""
    for _ in range(KILL_ROUNDS):
        found = [process for process in psutil.process_iter() if _belongs(process, is_ours, session)]
        if not found:
            return
        for process in found:
            for each in (*_children(process.pid), process):
                _kill(each)
        time.sleep(KILL_PAUSE_S)  # psutil's own waiting would reap our child
    raise RunnerError(
        f"Processes {[p.pid for p in found]} do not end.", "Look at them with ps; they may hang in the disk."
    )


def _belongs(process: psutil.Process, is_ours: Callable[[str], bool], session: int | None) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return os.getsid(process.pid) == session or is_ours(process.environ().get(TREE_VARIABLE, ""))
    except (psutil.Error, OSError):
        return False  # gone, or another user's


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


__all__ = ["Command", "Ended", "Tree", "kill_marked"]
