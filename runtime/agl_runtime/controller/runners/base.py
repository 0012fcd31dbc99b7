"""What executes agents, as a Protocol: processes of this machine now, containers and cluster jobs later.

A runner knows how to run the agent of one attempt to its end and to leave nothing of it alive. It decides nothing: what
an end means is `controller/decide.py`'s matter, and a failed agent is data here, not an exception.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agl_runtime.schemas import Grant


@dataclass(frozen=True, slots=True)
class AgentExit:
    """How an agent ended. Exactly one of `exit_code` and `signal` is set.

    `cpu_s` and `max_rss_mb` (MiB, of its largest process) are those of the agent and of the children it waited for. The
    kernel counts the starting process in, so `max_rss_mb` is never less than what the controller itself had.
    """

    exit_code: int | None
    signal: int | None
    timed_out: bool
    duration_s: float
    cpu_s: float
    max_rss_mb: float
    over_disk: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.was_stopped

    @property
    def was_stopped(self) -> bool:
        """By its time limit or by that of its disk space."""
        return self.timed_out or self.over_disk


@dataclass(frozen=True, slots=True)
class Kept:
    """One output stream: the text that was kept of its beginning, and how many bytes were printed in all."""

    text: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class AgentRun:
    """An agent that ran to its end, and what it left behind."""

    exit: AgentExit
    stdout: Kept
    stderr: Kept
    workspace: Path


class Runner(Protocol):
    @property
    def isolation(self) -> str:
        """How agents are separated from agl, for reports: "bubblewrap", "unshare" or "none: <reason>"."""
        ...

    @property
    def starts(self) -> str:
        """How agents start, for reports: "cold", "warm", or one of these with the reason why not all are warm."""
        ...

    async def run(self, grant: Grant, expired: asyncio.Event) -> AgentRun:
        """Run the agent of one attempt. When `expired` is set it is killed and reported as timed out; when this call is
        cancelled it is killed. Either way no process of its tree is alive afterwards.

        Raises RunnerError when the agent could not be started or watched, and ConfigError when this task can never be
        started as configured.
        """
        ...

    async def release(self, grant: Grant) -> None:
        """The attempt has been judged: what was only kept for that may go."""
        ...
