"""A gateway to talk to: the one that runs for the project, or one that is started for as long as it is needed.

The command line never opens the store itself, so that one process alone writes it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from agl_cli import diagnostics
from agl_cli.runstate import RunLock, read_record
from agl_cli.supervisor import PartCommand, PartEnd, Supervisor
from agl_runtime.client import GatewayClient
from agl_runtime.config import Project
from agl_runtime.errors import AglError, ConfigError, PreconditionError
from agl_runtime.part import admin_key, gateway_url

T = TypeVar("T")
START_S = 60.0
PATIENCE_S = 15.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Session:
    """`supervisor` is None where the parts belong to another command, such as a running `agl up`."""

    client: GatewayClient
    supervisor: Supervisor | None

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless a part that was started for it fails for good: that raises AglError."""
        return await _unless_ended(self.supervisor, work) if self.supervisor else await work


@asynccontextmanager
async def open_session(project: Project, commands: Sequence[PartCommand], command: str) -> AsyncIterator[Session]:
    """Use the parts that run when they include those of `commands`, or start these and stop them again.

    Those that the same `command` started in another terminal are not used: they stop when that one is done. Raises
    PreconditionError when other parts run, and what a part said when it failed for good.
    """
    record = read_record(project.state_dir)
    if record is not None and record.command != command and {item.name for item in commands} <= record.parts.keys():
        async with await _client(project) as client:
            yield Session(client, None)
        return
    with RunLock(project.state_dir, command) as lock:
        supervisor = Supervisor(project.state_dir, commands, notify=diagnostics.note, record=lock.record)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)  # asyncio ends in order on that one
        await supervisor.start()
        try:
            async with await _unless_ended(supervisor, _client(project)) as client:
                yield Session(client, supervisor)
        finally:
            await supervisor.stop()
            loop.remove_signal_handler(signal.SIGTERM)


async def _client(project: Project) -> GatewayClient:
    """Once the gateway has said where it listens. Raises PreconditionError when it never does."""
    give_up_at = time.monotonic() + START_S
    while True:
        try:
            url = gateway_url(project.state_dir)
            return GatewayClient(url, admin_key(project.state_dir), patience_s=PATIENCE_S)
        except PreconditionError:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(POLL_S)


async def _unless_ended(supervisor: Supervisor, work: Coroutine[Any, Any, T]) -> T:
    task, ended = asyncio.create_task(work), asyncio.create_task(supervisor.ended())
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise part_error(ended.result())
        return task.result()
    finally:
        task.cancel()
        ended.cancel()
        await asyncio.gather(task, ended, return_exceptions=True)


def part_error(end: PartEnd) -> AglError:
    """What a part said last, as the error that its exit code stands for."""
    kind = {diagnostics.USAGE: ConfigError, diagnostics.MISSING: PreconditionError}.get(end.code, AglError)
    said, see = end.error or f"it ended with exit code {end.code}.", f"See `agl logs {end.name}`."
    return kind(f"The {end.name} stopped: {said.removesuffix(see).rstrip()}", see)
