"""One started command with everything that it starts: its output kept and capped, its end awaited, no process left.

The output is read as fast as it comes, also past what is kept, so a command is never blocked by it and costs no memory.
In a sandbox the kernel ends the whole tree with its first process. Without one, the tree's processes are found by
session, by descent and by a marker in their environment, which a process keeps through setsid and double forks.

The process is reaped here and nowhere else, in the event loop's thread, so a signal never meets a reused pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from agl_runtime.controller.runners.base import AgentExit, Kept
from agl_runtime.controller.runners.environment import TREE_VARIABLE
from agl_runtime.controller.runners.isolation import exit_code
from agl_runtime.errors import RunnerError

CHUNK_BYTES = 256 * 1024
POLL_S = 0.02
SANDBOX_END_S = 2.0
KILL_ROUNDS = 200
KILL_PAUSE_S = 0.01
LAST_READS = 64  # more than a pipe holds: an escaped writer cannot keep `end` busy
REPORT_BYTES = 2**20  # more than a socket holds


class Process(Protocol):
    """A started command's first process. Until it is reaped its `pid` is no other's."""

    pid: int

    def reap(self) -> Usage:
        """Call it once, when the process has ended. Raises RunnerError where its end is not to be known."""
        ...


@dataclass(frozen=True, slots=True)
class Usage:
    """How a process ended (`code`, negative for a signal), and what it and the children it waited for used."""

    code: int
    cpu_s: float
    max_rss_mb: float

    @classmethod
    def of(cls, status: int, cpu_s: float, max_rss: int) -> Usage:
        """From what wait4 tells; its unit of memory is the system's."""
        in_mb = 2**20 if sys.platform == "darwin" else 2**10
        return cls(os.waitstatus_to_exitcode(status), round(cpu_s, 3), round(max_rss / in_mb, 1))


@dataclass(frozen=True, slots=True)
class Command:
    """`notes` is a folder for `stdout` and `stderr`, of each of which `keep_bytes` are kept. The environment must hold
    TREE_VARIABLE with a value of its own. A `sandboxed` command is told by its standard input where to report.
    `start` makes the first process, a session's leader, with the descriptors of its standard streams; it raises OSError
    or ValueError."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    notes: Path
    keep_bytes: int
    sandboxed: bool = False
    start: Callable[[Command, Sequence[int]], Process] | None = None


class _Spawned:
    def __init__(self, command: Command, streams: Sequence[int]) -> None:
        stdin, out, err = streams
        self._process = subprocess.Popen(
            command.argv, env=command.env, cwd=command.cwd, stdin=stdin, stdout=out, stderr=err, start_new_session=True
        )
        self.pid = self._process.pid

    def reap(self) -> Usage:
        _, status, used = os.wait4(self.pid, 0)
        usage = Usage.of(status, used.ru_utime + used.ru_stime, used.ru_maxrss)
        self._process.returncode = usage.code
        return usage


@dataclass(frozen=True, slots=True)
class Ended:
    """`is_told` is False when a sandbox ended without having begun its command."""

    exit: AgentExit
    stdout: Kept
    stderr: Kept
    is_told: bool


class _Drain:
    """Reads what is written to `stream` to its end: the beginning into a file, the rest into a count. Making it raises
    OSError."""

    def __init__(self, file: Path, keep_bytes: int) -> None:
        self._file = file.open("w+b", buffering=0)
        try:
            self._stream, self.stream = os.pipe()
        except OSError:
            self._file.close()
            raise
        self._room = keep_bytes
        self._size = 0
        self.error: OSError | None = None
        os.set_blocking(self._stream, False)
        asyncio.get_running_loop().add_reader(self._stream, self._read)

    def _read(self) -> bool:
        """False when nothing more is there now."""
        try:
            data = os.read(self._stream, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._stream)
            return False
        try:
            self._file.write(data[: self._room])
        except OSError as error:  # the disk is full: read on, so that the command is not blocked
            self.error = error
        self._room = max(0, self._room - len(data))
        self._size += len(data)
        return True

    def close(self) -> Kept:
        """Take what is still in the pipe; its writers are dead."""
        for _ in range(LAST_READS):
            if not self._read():
                break
        asyncio.get_running_loop().remove_reader(self._stream)
        os.close(self._stream)
        with self._file as file:
            file.seek(0)
            return Kept(file.read().decode(errors="replace"), self._size)


class Tree:
    """A started command. `wait` for it, and `end` it in every case. Starting raises RunnerError."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._began = time.monotonic()
        self._drains: list[_Drain] = []
        # All that can fail comes before the start: nothing runs that nobody ends.
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            try:
                # Not a pipe, which the sandbox's root could open anew and read.
                self._report, report_to = map(ours.enter_context, socket.socketpair())
                theirs.enter_context(report_to)
                null = theirs.enter_context(open(os.devnull, "rb"))
                for name in ("stdout", "stderr"):
                    self._drains.append(drain := _Drain(command.notes / name, command.keep_bytes))
                    ours.callback(drain.close)
                    theirs.callback(os.close, drain.stream)
                out, err = (drain.stream for drain in self._drains)
                stdin = report_to if command.sandboxed else null
                self._process = (command.start or _Spawned)(command, (stdin.fileno(), out, err))
            except (OSError, ValueError) as error:
                what = f"{command.argv[0]} cannot be started: {error}."
                raise RunnerError(what, "Start it by hand; long texts belong in {task_file}.") from error
            ours.pop_all()
        self._handle = _handle(self._process.pid)

    async def wait(self, wake: asyncio.Event | None = None) -> bool:
        """Until the first process has ended, which sets `wake`, or until that is set elsewhere. True when it has ended;
        it is not reaped yet."""
        wake = wake or asyncio.Event()
        if self._handle is None:
            while not (self._has_ended() or wake.is_set()):
                await asyncio.sleep(POLL_S)
            return self._has_ended()
        asyncio.get_running_loop().add_reader(self._handle, wake.set)
        try:
            await wake.wait()
        finally:
            asyncio.get_running_loop().remove_reader(self._handle)
        return self._has_ended()

    def _has_ended(self) -> bool:
        if self._handle is not None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            return bool(poll.poll(0))
        return bool(psutil.Process(self._process.pid).status() == psutil.STATUS_ZOMBIE)

    async def end(self, *, timed_out: bool = False) -> Ended:
        """Kill what is still alive of the tree, wait until nothing is, and say what there was. Raises RunnerError."""
        if not self._command.sandboxed:
            await self._kill_marked()
        elif not self._has_ended():
            await self._end_sandbox()
        await self.wait()
        told = self._told()
        if self._command.sandboxed and told in (None, -signal.SIGKILL):  # it may have been killed before those inside
            await self._kill_marked()
        duration_s = time.monotonic() - self._began
        stdout, stderr = (drain.close() for drain in self._drains)
        if self._handle is not None:
            os.close(self._handle)
        usage = self._process.reap()
        for error in filter(None, (drain.error for drain in self._drains)):
            raise RunnerError(f"Output in {self._command.notes} cannot be kept: {error}.", "Check the disk.")
        code = usage.code
        if self._command.sandboxed:
            code = -signal.SIGKILL if told is None else told
        ended = AgentExit(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            timed_out=timed_out,
            duration_s=round(duration_s, 3),
            cpu_s=usage.cpu_s,
            max_rss_mb=usage.max_rss_mb,
        )
        return Ended(ended, stdout, stderr, is_told=told is not None or not self._command.sandboxed)

    def _told(self) -> int | None:
        with self._report:
            try:
                return exit_code(self._report.recv(REPORT_BYTES, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return None

    async def _kill_marked(self) -> None:
        mark = self._command.env[TREE_VARIABLE]
        await asyncio.to_thread(kill_marked, lambda value: value == mark, self._process.pid)

    async def _end_sandbox(self) -> None:
        """Kill the namespace's first process, so that the sandbox still accounts for it; then the sandbox itself."""
        _kill_with_children(self._process.pid, itself=False)
        try:
            async with asyncio.timeout(SANDBOX_END_S):
                await self.wait()
        except TimeoutError:
            os.kill(self._process.pid, signal.SIGKILL)


def _handle(pid: int) -> int | None:
    """The kernel's descriptor of a process; None outside Linux, or on an old one."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def kill_marked(is_ours: Callable[[str], bool], session: int | None = None) -> None:
    """Kill every process of the session (its leader also where it is none yet, as just after a fork) or with a mark
    that `is_ours`, and what these started; repeated until none is left. Blocks. Raises RunnerError when some
    survive."""
    for _ in range(KILL_ROUNDS):
        found = [process for process in psutil.process_iter() if _belongs(process, is_ours, session)]
        if not found:
            return
        for process in found:
            _kill_with_children(process.pid)
        time.sleep(KILL_PAUSE_S)  # psutil's own waiting would reap our child
    raise RunnerError(
        f"Processes {[p.pid for p in found]} do not end.", "Look at them with ps; they may hang in the disk."
    )


def _belongs(process: psutil.Process, is_ours: Callable[[str], bool], session: int | None) -> bool:
    try:
        in_session = session in (process.pid, os.getsid(process.pid))
        ours = in_session or is_ours(process.environ().get(TREE_VARIABLE, ""))
        return ours and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False  # gone, or another user's


def _kill_with_children(pid: int, *, itself: bool = True) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (*process.children(recursive=True), *([process] if itself else [])):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
