"""A runner whose agents are a test's: each attempt ends as scripted, or runs until it is told to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agl_runtime.controller.runners.base import AgentExit, AgentRun, Kept
from agl_runtime.schemas import Grant


def ran(code: int | None = 0, signal: int | None = None, *, timed_out: bool = False, stdout: str = "") -> AgentRun:
    exit_state = AgentExit(code, signal, timed_out, duration_s=1.5, cpu_s=0.25, max_rss_mb=30.0)
    return AgentRun(exit_state, Kept(stdout, len(stdout)), Kept("", 0), Path("/nowhere"))


def well(grant: Grant) -> AgentRun:
    return ran()


@dataclass
class FakeRunner:
    """`script` gives an attempt's end, raises, or returns None for an agent that runs until `expired` or for ever."""

    script: Callable[[Grant], AgentRun | None] = well
    isolation: str = "none: a fake"
    starts: str = "cold"
    started: list[tuple[str, str]] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    most_at_once: int = 0
    released: list[tuple[str, str]] = field(default_factory=list)

    async def run(self, grant: Grant, expired: asyncio.Event) -> AgentRun:
        rollout_id = grant.rollout.rollout_id
        self.started.append((rollout_id, grant.attempt_id))
        self.running.add(rollout_id)
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            await asyncio.sleep(0)
            end = self.script(grant)
            if end is None:
                await expired.wait()
                return ran(None, 9, timed_out=True)
            return end
        finally:
            self.running.discard(rollout_id)

    async def release(self, grant: Grant) -> None:
        self.released.append((grant.rollout.rollout_id, grant.attempt_id))
