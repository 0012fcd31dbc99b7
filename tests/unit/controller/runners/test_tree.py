"""A started command is ended whatever moment that comes at, and one that cannot be watched is not started."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from agl_runtime.controller.runners.environment import TREE_VARIABLE
from agl_runtime.controller.runners.tree import Command, Tree, Usage
from agl_runtime.errors import RunnerError


class BarelyForked:
    """A process that has neither its session nor its mark yet."""

    def __init__(self, command: Command, streams: Sequence[int]) -> None:
        self._process = subprocess.Popen(command.argv, env={})
        self.pid = self._process.pid

    def reap(self) -> Usage:
        self._process.wait()
        return Usage(self._process.returncode, 0.0, 0.0)


def command(folder: Path) -> Command:
    env = {TREE_VARIABLE: f"{folder}:r/0", "PATH": os.defpath}
    return Command(["sleep", "60"], env, folder, folder, 100, start=BarelyForked)


async def test_a_process_that_is_no_session_yet_is_ended_too(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        ended = await Tree(command(tmp_path)).end(timed_out=True)
    assert ended.exit.signal == 9


async def test_what_has_no_place_for_its_output_is_not_started_and_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "stderr").mkdir()
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = os.listdir("/proc/self/fd"), children.read_text()
    with pytest.raises(RunnerError, match=r"^sleep cannot be started: "):
        Tree(command(tmp_path))
    assert (os.listdir("/proc/self/fd"), children.read_text()) == before
