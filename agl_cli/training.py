"""Runs the three parts until the trainer has ended, a part has failed for good, or the user stops it.

`run_parts` is what `agl up`, `agl eval` and `agl demo` share. The first Ctrl-C or SIGTERM stops the parts gracefully,
the second kills them; a run that was stopped goes on when it is started again.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agl_cli import diagnostics
from agl_cli.progress import Display, make_display
from agl_cli.project import MetricsTail, read_summary
from agl_cli.runstate import RunLock
from agl_cli.session import part_error
from agl_cli.supervisor import PartCommand, PartEnd, Supervisor, part_command
from agl_runtime.client import GatewayClient
from agl_runtime.config import Project
from agl_runtime.errors import GatewayError, PreconditionError
from agl_runtime.part import admin_key, gateway_url

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`summary` is what the trainer wrote in this run, or None. `code` is the exit code that the command owes."""

    code: int
    summary: dict[str, Any] | None


class _Stop:
    """Turns signals into a graceful stop and, on the second one, into the end of everything."""

    def __init__(self, supervisor: Supervisor, display: Display) -> None:
        self._supervisor = supervisor
        self._display = display
        self.asked = asyncio.Event()

    def __enter__(self) -> _Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.asked.is_set():
            self._display.say("Killing the parts.")
            self._supervisor.kill()
            return
        self._display.say("Stopping; what was recorded and trained is kept. Ctrl-C again kills the parts at once.")
        self.asked.set()


async def run_parts(project: Project, settings: Sequence[str], *, command: str, trainer: Sequence[str] = ()) -> Outcome:
    """Supervise gateway, controller and trainer to the end; `trainer` are further arguments of that part.

    Raises PreconditionError when the project is in use, and what a part said when it failed for good.
    """
    before = read_summary(project.state_dir)
    with RunLock(project.state_dir, command) as lock, make_display(project.config.train.steps) as display:
        commands = part_commands(project, settings, *trainer)
        supervisor = Supervisor(project.state_dir, commands, notify=display.say, record=lock.record)
        with _Stop(supervisor, display) as stop:
            tail = MetricsTail(project.state_dir, from_end=True)
            await supervisor.start()
            follower = asyncio.create_task(_follow(project, tail, display))
            try:
                end = await _first_of(supervisor, stop)
            finally:
                follower.cancel()
                await asyncio.wait([follower])
                await supervisor.stop()
            for row in tail.read():
                display.row(row)
    if end is not None and end.code != diagnostics.DONE:
        raise part_error(end)
    summary = read_summary(project.state_dir)
    return _outcome(None if summary == before else summary, ended=end is not None)


def part_commands(project: Project, settings: Sequence[str], *trainer: str) -> list[PartCommand]:
    """The three parts of a run; the trainer's end is the run's."""
    return [
        part_command("gateway", project.root, settings),
        part_command("controller", project.root, settings),
        part_command("trainer", project.root, settings, *trainer, once=True),
    ]


async def _first_of(supervisor: Supervisor, stop: _Stop) -> PartEnd | None:
    """The part that ended, or None when the user asked for the stop."""
    tasks = {asyncio.create_task(supervisor.ended()), asyncio.create_task(stop.asked.wait())}
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    end = done.pop().result()
    return end if isinstance(end, PartEnd) else None


def _outcome(summary: dict[str, Any] | None, *, ended: bool) -> Outcome:
    """`ended`: the trainer came to its end by itself. A run that was stopped before its end never looks complete."""
    if not ended and (summary is None or summary["ended"] != "complete"):
        return Outcome(diagnostics.INTERRUPTED, summary)
    failed = ended and (summary is None or summary["ended"] in ("failed", "no_signal"))
    return Outcome(diagnostics.FAILED if failed else diagnostics.DONE, summary)


async def _follow(project: Project, tail: MetricsTail, display: Display) -> None:
    """Show what happens until cancelled; a gateway that does not answer is no reason to end."""
    while True:
        try:
            async with GatewayClient(
                gateway_url(project.state_dir), admin_key(project.state_dir), patience_s=0
            ) as client:
                while True:
                    for row in tail.read():
                        display.row(row)
                    display.state(await client.parts())
                    await asyncio.sleep(POLL_S)
        except (PreconditionError, GatewayError):
            await asyncio.sleep(POLL_S)
