"""The user's reward function, called in a process of its own with the user's interpreter and a time limit.

It is trusted code of the project: it runs unsandboxed in the project's folder with the user's environment, but without
agl's own variables and key. It is never run inside agl, so whatever it does (raise, hang, exit, print) is one sentence
of a RewardError, and never a zero.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agl_runtime.config import Project
from agl_runtime.controller import reward_child
from agl_runtime.controller.decide import readable
from agl_runtime.controller.runners.base import AgentRun
from agl_runtime.controller.runners.environment import TREE_VARIABLE, Installation, user_path
from agl_runtime.controller.runners.tree import Command, Ended, Tree
from agl_runtime.errors import RewardError

KEEP_BYTES = 64 * 1024
HIDDEN = frozenset({"PYTHONPATH", "PYTHONHOME"})
HIDDEN_PREFIX = "AGL_"
TAIL = 500
MOST_CHARS = 2000
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Reward:
    value: float
    parts: dict[str, float]


class RewardFunction:
    """`project`'s reward.function. Call `check` before `score`."""

    def __init__(
        self, project: Project, *, environ: Mapping[str, str] = os.environ, agl: Installation | None = None
    ) -> None:
        """Raises RewardError when no function, or no interpreter for it, is there."""
        config = project.config.reward
        file, colon, name = (config.function or "").rpartition(":")
        if not colon or not name.isidentifier():
            raise RewardError(f"reward.function: `{config.function}` is not file.py:name.", "Name both.")
        self._name = f"{file}:{name}"
        self._file = project.path(file).resolve()
        self._function = name
        if not self._file.is_file():
            raise RewardError(f"reward.function: {self._file} does not exist.", "Write it, or correct the path.")
        self._root = project.root
        self._state_dir = project.state_dir
        self._timeout_s = config.timeout_s
        self._env = {
            key: value for key, value in environ.items() if key not in HIDDEN and not key.startswith(HIDDEN_PREFIX)
        }
        self._env["PATH"] = user_path(environ, agl or Installation.current())
        self._python = self._interpreter(config.python)
        self._parameters: frozenset[str] = frozenset()

    async def check(self) -> None:
        """Import the file and find the function, without calling it. Raises RewardError."""
        self._parameters = await self._ask({}, lambda answer: frozenset(map(str, answer["parameters"])))

    @property
    def wants_events(self) -> bool:
        return "events" in self._parameters

    async def score(self, task: Any, run: AgentRun, events: Sequence[Mapping[str, Any]]) -> Reward:
        """Raises RewardError."""
        ended = {"code": run.exit.exit_code, "signal": run.exit.signal, "timed_out": run.exit.timed_out}
        arguments = {
            "task": task,
            "workspace": str(run.workspace),
            "exit": ended,
            "output": {"stdout": run.stdout.text, "stderr": run.stderr.text},
            "events": list(events),
        }
        return await self._ask({"arguments": arguments}, _reward)

    async def _ask(self, request: Mapping[str, Any], read: Callable[[Any], Answer]) -> Answer:
        """Raises RewardError, also where `read` finds the answer of another shape: the function can write it too."""
        self._state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="reward-", dir=self._state_dir) as folder:
            notes = Path(folder)
            asked, answered = notes / "request.json", notes / "response.json"
            whole = {"file": str(self._file), "name": self._function, **request}
            asked.write_text(json.dumps(whole), encoding="ascii")
            argv = [self._python, str(Path(reward_child.__file__)), str(asked), str(answered)]
            mark = f"{self._state_dir.resolve()}:reward-{uuid.uuid4().hex}"
            env = {**self._env, TREE_VARIABLE: mark}
            ended = await self._run(Command(argv, env, self._root, notes, KEEP_BYTES))
            try:
                answer = json.loads(answered.read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise self._error(f"its process ended without an answer: {_last_words(ended)}") from error
        if isinstance(answer, dict) and "error" in answer:
            raise self._error(readable(str(answer["error"])[:MOST_CHARS]))
        try:
            return read(answer)
        except (TypeError, KeyError, AttributeError, OverflowError, reward_child.Refused) as error:
            raise self._error(f"its process ended with an answer of another shape: {_last_words(ended)}") from error

    async def _run(self, command: Command) -> Ended:
        tree = Tree(command)
        try:
            async with asyncio.timeout(self._timeout_s):
                await tree.wait()
        except TimeoutError as error:
            raise self._error(f"it did not answer within {self._timeout_s:g} s.") from error
        finally:
            ended = await asyncio.shield(tree.end())
        return ended

    def _interpreter(self, configured: str | None) -> str:
        name = configured or "python3"
        path = self._root / name if os.sep in name else shutil.which(name, path=self._env["PATH"])
        if path is None or not os.access(path, os.X_OK):
            raise RewardError(f"reward.python: no interpreter `{name}` was found.", "Name one with reward.python.")
        return str(path)

    def _error(self, what: str) -> RewardError:
        return RewardError(f"The reward function {self._name}: {what}", "Correct it; `agl doctor` checks it.")


def check_reward(project: Project) -> None:
    """Import the project's reward function once, in a process of its own. Blocks. Raises RewardError."""
    asyncio.run(RewardFunction(project).check())


def _reward(answer: Any) -> Reward:
    parts = {readable(name): reward_child.number(value, name) for name, value in answer["parts"].items()}
    return Reward(reward_child.number(answer["reward"], "reward"), parts)


def _last_words(ended: Ended) -> str:
    how = f"signal {ended.exit.signal}" if ended.exit.exit_code is None else f"exit code {ended.exit.exit_code}"
    return ended.stderr.text[-TAIL:].strip() or f"{how}."
