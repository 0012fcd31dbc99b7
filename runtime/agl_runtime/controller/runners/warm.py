"""Warm starts: Python agents forked from a process of the user's interpreter that has imported their modules once.

An agent that starts warm is run like one that starts cold: environment, folders, streams, session, sandbox, limits and
end are the same (`warm_helper` does the work). What a fork cannot give is started cold, with the reason kept: another
command than Python with a script or module, modules that cannot be imported or leave threads, a variable that the
interpreter reads when it starts. What modules keep at their import (the environment, a file of HOME) they keep of the
helper, which gets the user's part of the environment and the constant part of `agent.env`, never a rollout's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from agl_runtime.controller.runners import warm_helper
from agl_runtime.controller.runners.environment import TREE_VARIABLE, private
from agl_runtime.controller.runners.isolation import Isolation, View, exit_code, prove, sandbox_of
from agl_runtime.controller.runners.tree import Command, Usage
from agl_runtime.errors import RunnerError

log = logging.getLogger(__name__)

FOLDER = "run/warm"
IMPORT_S = 120.0
ANSWER_S = 10.0
ANSWER_BYTES = 2**20
STARTS = 2  # of the helper: one that dies is started once more
MOST_BYTES = 2**20  # of arguments and variables: what may be too much for a cold start is left to it
ROOM_BYTES = 16 * 1024  # in the helper's environment, for an agent's own
KEPT_FLAGS = frozenset("bBdEIOPqRsSu")
AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "MKL_")
"""Variables, by the beginning of their names, that the interpreter and its libraries read when they start."""


def start_of_python(words: Sequence[str]) -> int:
    """Where in a command Python's options end and a script or -m stands. Raises RunnerError."""
    fix = "Start the agent by `python FLAGS script.py` or `python -m module`, or leave agent.warm out."
    if not re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        raise RunnerError(f"agent.command starts `{words[0]}`, which is no Python interpreter.", fix)
    place = 1
    while place < len(words) and words[place].startswith("-") and words[place] != "-m":
        option = words[place]
        if option[:2] not in ("-W", "-X") and not (option[1:] and set(option[1:]) <= KEPT_FLAGS):
            raise RunnerError(f"A fork cannot keep Python's option `{option}`.", fix)
        place += 2 if option in ("-W", "-X") else 1
    named = words[place : place + 2] if words[place : place + 1] == ["-m"] else words[place : place + 1]
    if not named or (named[0] != "-m" and not named[0].endswith(".py")) or "{" in "".join(words[: place + len(named)]):
        raise RunnerError("agent.command names no script (.py) or module that is the same for all tasks.", fix)
    return place


class Helper:
    """A running `warm_helper`. Its methods block. Raises RunnerError when it does not start or answer.

    `python` is the interpreter with its options, `env` the environment that modules are imported in.
    """

    def __init__(self, python: Sequence[str], modules: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.python = list(python)
        self._env = dict(env)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        room = {"AGL_ROOM": "x" * ROOM_BYTES}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, (folder / "log").open("wb") as said:
                self._process = subprocess.Popen(
                    [*python, str(Path(warm_helper.__file__)), str(theirs.fileno()), *modules],
                    env={**env, **private(folder, folder), **room},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except OSError as error:
            self._control.close()
            raise RunnerError(f"{python[0]} cannot be started: {error}.", "Start it by hand.") from error
        self._loaded: frozenset[str] = frozenset()

    def import_modules(self) -> None:
        """Wait until it has."""
        answer = self._ask(None, timeout_s=IMPORT_S)
        if "refused" in answer:
            raise RunnerError(f"{answer['refused']}.", "Correct agent.warm, or leave it out.")
        self._loaded = frozenset(answer["loaded"])

    def unfit(self, command: Command) -> str | None:
        """Why this command cannot be forked, or None."""
        place = len(self.python)
        if command.argv[:place] != self.python:
            return "its interpreter is not that of the project"
        if sum(map(len, (*command.argv, *command.env, *command.env.values()))) > MOST_BYTES:
            return "its arguments are long"
        for name in command.env.keys() | self._env.keys():
            if name.startswith(AT_START) and command.env.get(name) != self._env.get(name):
                return f"{name} differs by task, and is read when the interpreter starts"
        if not all(map(os.path.isabs, command.env.get("PYTHONPATH", "/").split(os.pathsep))):
            return "PYTHONPATH is relative"
        script = command.argv[place]
        folder = command.cwd if script == "-m" else (command.cwd / script).parent
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                module = name.removesuffix(".py")
                if module in self._loaded and (module != name or (folder / name / "__init__.py").exists()):
                    return f"its {name} stands before an imported module of that name"
        return None

    def start(self, sandbox: Mapping[str, Any] | None, command: Command, streams: Sequence[int]) -> Forked:
        """Fork a process for a command. Raises OSError."""
        request = {
            "argv": command.argv[len(self.python) :],
            "orig_argv": command.argv,
            "env": {TREE_VARIABLE: command.env[TREE_VARIABLE], **command.env},
            "cwd": str(command.cwd),
            "sandbox": sandbox,
        }
        with os.fdopen(os.memfd_create("request"), "w+b") as file:
            file.write(json.dumps(request).encode())
            file.seek(0)
            try:
                answer = self._ask(b"fork", (*streams, file.fileno()))
            except RunnerError as error:
                raise OSError(error.what) from error
        if "error" in answer:
            raise OSError(answer["error"])
        return Forked(answer["pid"], self)

    def reap(self, pid: int) -> Usage:
        answer = self._ask(str(pid).encode())
        return Usage.of(answer["status"], answer["cpu_s"], answer["rss_kb"])

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        """End it, and with it every sandbox that it has started. Another thread that waits for it is told."""
        self._process.kill()
        self._process.wait()
        self._control.close()

    def _ask(self, message: bytes | None, descriptors: Sequence[int] = (), timeout_s: float = ANSWER_S) -> Any:
        why = ""
        try:
            self._control.settimeout(timeout_s)  # one that has closed it already says so here
            if message is not None:
                socket.send_fds(self._control, [message], list(descriptors))
            answer = self._control.recv(ANSWER_BYTES)
        except OSError as error:
            self._process.kill()
            answer, why = b"", f" ({error})"
        if not answer:
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise RunnerError(f"The helper of warm starts ended with {how}{why}.", f"See {FOLDER}/log in .agl.")
        return json.loads(answer)


@dataclass(slots=True)
class Forked:
    """Implements `tree.Process`."""

    pid: int
    helper: Helper

    def reap(self) -> Usage:
        return self.helper.reap(self.pid)


@dataclass
class WarmStarts:
    """The helper of a project's agents: started with the first of them, and again when it dies. `words` is their
    command and `env` what of their environment is the same for all. Close it."""

    words: Sequence[str]
    modules: Sequence[str]
    env: Mapping[str, str]
    state_dir: Path
    isolation: Isolation
    refused: RunnerError | None = None
    _helper: Helper | None = None
    _ready: asyncio.Future[None] | None = None
    _starts: int = 0
    _exceptions: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        try:
            if not sys.platform.startswith("linux"):
                raise RunnerError(f"A fork is unsafe on {sys.platform}.", "Leave agent.warm out here.")
            start_of_python(self.words)
        except RunnerError as error:
            self._refuse(error)

    def __str__(self) -> str:
        """How agents start, for reports: "warm", "warm, but for some: <reasons>" or "cold: <reason>"."""
        if self.refused is not None:
            return f"cold: {self.refused.what}"
        return f"warm, but for some: {'; '.join(sorted(self._exceptions))}" if self._exceptions else "warm"

    async def helper(self) -> Helper | None:
        """One that is ready; None when agents start cold."""
        if self._ready and self._ready.done() and self._helper and self._helper.has_ended():
            self.close()
            self._ready = None
        if self._ready is None:
            self._ready = asyncio.ensure_future(asyncio.to_thread(self._start))
        await asyncio.shield(self._ready)
        return self._helper

    def fitted(self, helper: Helper, command: Command, view: View | None) -> Command | None:
        """The command as one that the helper starts, or None, with the reason told once."""
        if reason := helper.unfit(command):
            if reason not in self._exceptions:
                self._exceptions.add(reason)
                log.warning("an agent starts cold: %s", reason)
            return None
        start = partial(helper.start, None if view is None else sandbox_of(view))
        return replace(command, sandboxed=view is not None, start=start)

    def close(self) -> None:
        if self._helper is not None:
            self._helper.close()
            self._helper = None

    def _start(self) -> None:
        """Blocks."""
        self._starts += 1
        if self.refused is not None:
            return
        if self._starts > STARTS:
            return self._refuse(RunnerError("The helper of warm starts died again.", f"See {FOLDER}/log in .agl."))
        try:
            python = self.words[: start_of_python(self.words)]
            env = {TREE_VARIABLE: f"{self.state_dir}:warm", **self.env}
            self._helper = Helper(python, self.modules, env, self.state_dir / FOLDER)
            self._helper.import_modules()
            if self.isolation.wrap is not None:
                _prove(self._helper)
        except RunnerError as error:
            self._refuse(error)
        except OSError as error:
            self._refuse(RunnerError(f"A warm start failed: {error}.", "Leave agent.warm out."))

    def _refuse(self, error: RunnerError) -> None:
        self.close()
        self.refused = error
        log.warning("agents start cold: %s", error)


def _prove(helper: Helper) -> None:
    try:
        prove(partial(_trial, helper))
    except RunnerError as error:
        raise RunnerError(f"A forked agent cannot be isolated: {error.what}.", "Leave agent.warm out here.") from error


def _trial(helper: Helper, checks: str, view: View, notes: Path) -> tuple[int | None, str]:
    script = view.cwd / "trial.py"
    script.write_text(f"import os, sys\nsys.exit(os.system({checks!r}) != 0)\n", encoding="utf-8")
    command = Command([*helper.python, script.name], {TREE_VARIABLE: f"{notes}:trial"}, view.cwd, notes, 0)
    ours, report = socket.socketpair()
    with ours, (notes / "said").open("w+b") as said:
        with report:
            helper.reap(helper.start(sandbox_of(view), command, (report.fileno(), said.fileno(), said.fileno())).pid)
        said.seek(0)
        return exit_code(ours.makefile("rb").read()), said.read().decode(errors="replace")
