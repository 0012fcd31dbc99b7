"""What a trainer process is for: `train` runs to its end, `eval` measures once, `serve` serves until it is stopped.

Whatever the configuration gets wrong is refused before anything heavy is imported or anything is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agl_runtime.client import GatewayClient
from agl_runtime.config import Config, Project
from agl_runtime.errors import AglError, ConfigError, TrainerError
from agl_runtime.part import METRICS_FILE, SUMMARY_FILE, Part, connect
from agl_runtime.trainer import checks, state
from agl_runtime.trainer.backends.base import Backend
from agl_runtime.trainer.external import ExternalServer
from agl_runtime.trainer.loop import RunContext, Tasks, TrainingLoop
from agl_runtime.trainer.measure import Measured, measure
from agl_runtime.trainer.metrics import MetricsLog, Outcome, summary, validation_line, write_summary
from agl_runtime.trainer.policy import Policy
from agl_runtime.trainer.progress import Progress
from agl_runtime.trainer.rollouts import EVAL_RUN, RolloutDesk, Work, is_left_measurement, recipe
from agl_runtime.trainer.schedule import BASE_VERSION, State

T = TypeVar("T")

log = logging.getLogger(__name__)


def make_backend(config: Config, policy: Path) -> Backend:
    """The backend that the configuration names. Imports torch. Raises PreconditionError."""
    from agl_runtime.trainer.backends import embedded

    return embedded.create(config, policy)


@dataclass(frozen=True, slots=True)
class Outside:
    """What a mode reaches outside this process: how it makes its backend, and how it finds the gateway."""

    make_backend: Callable[[Config, Path], Backend] = make_backend
    connect: Callable[[Part], Awaitable[GatewayClient]] = connect


class Stopped(Exception):
    """The stop came while the gateway was still waited for, so that there is nothing to end in order."""


async def train(part: Part, stop: asyncio.Event, outside: Outside = Outside()) -> None:
    """Begin or continue the project's run; writes summary.json however it ends. Raises AglError."""
    project = part.project
    tasks = Tasks(checks.training_tasks(project), checks.validation_tasks(project))
    base = checks.policy_folder(project)
    with state.exclusive(project.state_dir):
        run = state.open_run(project.state_dir, str(project.config.model.path), project.config.train.seed)
        newest = state.newest_checkpoint(project.state_dir, run.run_id)
        metrics = MetricsLog(project.state_dir / METRICS_FILE, run.run_id)
        if run.ended == "complete" and run.steps >= project.config.train.steps:
            metrics.rewind(run.steps)
            _summarise(project, run, metrics, _complete_already(run, newest))
            return
        metrics.rewind(newest.saved.step if newest else 0, newest.saved.line if newest else None)
        try:
            outcome = await _run(part, stop, outside, base, tasks, run, newest, metrics)
        except AglError as error:
            newest = state.newest_checkpoint(project.state_dir, run.run_id)
            step = max((line["step"] for line in metrics.lines), default=0)
            failed = Outcome("failed", step, newest.version if newest else BASE_VERSION, str(error))
            _summarise(project, run, metrics, failed)
            raise
        state.close_run(project.state_dir, run, outcome.ended, outcome.step)
        _summarise(project, run, metrics, outcome)


@dataclass(frozen=True, slots=True)
class Served:
    """A policy that serves. `folder` is where it comes from; None for a server that agl does not run."""

    client: GatewayClient
    policy: Policy
    folder: Path | None


async def evaluate(
    part: Part,
    stop: asyncio.Event,
    outside: Outside = Outside(),
    *,
    policy: Path | None = None,
    samples: int | None = None,
) -> None:
    """Measure a policy (the newest checkpoint, or else the base) on the validation tasks; writes summary.json, in which
    `after` is the result. Raises AglError."""
    project, config = part.project, part.project.config
    tasks = checks.tasks_to_measure(project)
    if samples is not None and samples < 1:
        raise ConfigError(f"--samples is {samples}.", "It must be at least 1.")
    checks.require_reward(config)
    run_id, size, name = f"{EVAL_RUN}{secrets.token_hex(4)}", samples or config.eval.samples, recipe(config)
    async with _serving(part, stop, outside, policy) as served:
        version = served.policy.version
        progress = Progress(run_id=run_id, version=str(version))
        work = [Work(run_id, version, f"val{n}", task, size, 0, False, name) for n, task in enumerate(tasks)]
        measured = await _measure(served, work, progress, stop, config.agent.timeout_s)
        await _say_done(served.client, progress)
    result = measured.result if measured else None
    if measured and not result:
        raise TrainerError("No validation rollout got a reward.", "See `agl logs controller`.")
    lines = [validation_line(0, version, result, measured.ended, measured.seconds)] if measured and result else []
    content = summary(
        lines,
        run_id=run_id,
        mode="eval",
        seed=config.train.seed,
        elapsed_s=measured.seconds if measured else 0.0,
        checkpoint=served.folder,
        outcome=Outcome("complete" if measured else "stopped", 0, version),
    )
    write_summary(project.state_dir / SUMMARY_FILE, {**content, "before": None, "after": content["before"]})


async def serve(part: Part, stop: asyncio.Event, outside: Outside = Outside(), *, policy: Path | None = None) -> None:
    """Serve a policy (the newest checkpoint, or else the base) until `stop`. Raises AglError."""
    async with _serving(part, stop, outside, policy) as served:
        progress = Progress(version=str(served.policy.version))
        progress.enter("serving")
        await first_of(progress.report(served.client, served.policy.announce), stop.wait())


async def first_of(*work: Awaitable[T]) -> T:
    """What the first of these gives or raises (of those that end together, the one named first); the others are
    cancelled."""
    going = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in going if task.done()).result()
    finally:
        for task in going:
            task.cancel()
        await asyncio.gather(*going, return_exceptions=True)


async def _run(
    part: Part,
    stop: asyncio.Event,
    outside: Outside,
    base: Path,
    tasks: Tasks,
    run: state.Run,
    newest: state.Checkpoint | None,
    metrics: MetricsLog,
) -> Outcome:
    project = part.project
    epoch = state.next_epoch(project.state_dir)
    if project.config.train.backend == "verl":
        return await _run_verl(part, stop, outside, run, epoch, newest, metrics)
    backend = outside.make_backend(project.config, base)
    begin_at = newest.saved.schedule_state(metrics.validated()) if newest else State(validated=metrics.validated())
    progress = Progress(run_id=run.run_id, step=begin_at.step, steps=project.config.train.steps)
    async with await _connected(part, stop, outside) as client:
        await client.report(progress.status())
        policy = Policy(client, backend, project.config.gateway.upstream_timeout_s)
        async with policy.serving(epoch, newest.folder if newest else None, is_chosen=newest is None):
            if newest:
                await client.record_checkpoint(newest.saved.record(newest.folder))
            loop = TrainingLoop(RunContext(project, client, policy, tasks, run, epoch, metrics, progress))
            outcome = await loop.run(begin_at, stop)
        await _say_done(client, progress)
        return outcome


async def _run_verl(
    part: Part,
    stop: asyncio.Event,
    outside: Outside,
    run: state.Run,
    epoch: int,
    newest: state.Checkpoint | None,
    metrics: MetricsLog,
) -> Outcome:
    """verl's own loop trains; see `backends.verl`."""
    from agl_runtime.trainer.backends.verl import launch

    steps = part.project.config.train.steps
    progress = Progress(run_id=run.run_id, step=newest.saved.step if newest else 0, steps=steps)
    async with await _connected(part, stop, outside) as client:
        if newest:
            await client.record_checkpoint(newest.saved.record(newest.folder))
        start = launch.Start(part.project, client, run, epoch, newest, metrics, progress)
        outcome = await launch.train(start, stop)
        await _say_done(client, progress)
        return outcome


async def _connected(part: Part, stop: asyncio.Event, outside: Outside) -> GatewayClient:
    """A gateway that fails at its start never announces itself. Raises Stopped."""

    async def stopped() -> GatewayClient:
        await stop.wait()
        raise Stopped

    return await first_of(outside.connect(part), stopped())


@contextlib.asynccontextmanager
async def _serving(part: Part, stop: asyncio.Event, outside: Outside, policy: Path | None) -> AsyncIterator[Served]:
    project, endpoint = part.project, part.project.config.model.endpoint
    with state.exclusive(project.state_dir):
        folder: Path | None = None
        newest = None if policy else state.newest_checkpoint(project.state_dir)
        if endpoint and policy is None:
            backend: Backend = ExternalServer(project.config.model.name, endpoint)
        else:
            folder = checks.policy_folder(project, policy or (newest.folder if newest else None))
            backend = outside.make_backend(project.config, folder)
        async with await _connected(part, stop, outside) as client:
            server = Policy(client, backend, project.config.gateway.upstream_timeout_s)
            async with server.serving(state.next_epoch(project.state_dir), None, is_chosen=newest is None):
                yield Served(client, server, folder)


async def _measure(
    served: Served, work: list[Work], progress: Progress, stop: asyncio.Event, timeout_s: float
) -> Measured | None:
    """None when it was stopped."""
    desk = RolloutDesk(served.client, timeout_s)
    await desk.open()
    await desk.cancel(lambda rollout: is_left_measurement(rollout, work[0].run_id))
    report = progress.report(served.client, served.policy.announce)
    result = await first_of(measure(desk, work, progress), desk.watch(), report, stop.wait())
    return result if isinstance(result, Measured) else None


async def _say_done(client: GatewayClient, progress: Progress) -> None:
    progress.enter("done")
    await client.report(progress.status())


def _complete_already(run: state.Run, newest: state.Checkpoint | None) -> Outcome:
    reason = f"Run {run.run_id} is complete: {run.steps} steps were done before. Raise train.steps to continue it."
    log.info("%s", reason)
    return Outcome("complete", run.steps, newest.version if newest else BASE_VERSION, reason)


def _summarise(project: Project, run: state.Run, metrics: MetricsLog, outcome: Outcome) -> None:
    newest = state.newest_checkpoint(project.state_dir, run.run_id)
    content = summary(
        metrics.lines,
        run_id=run.run_id,
        mode="train",
        seed=run.seed,
        elapsed_s=metrics.elapsed_s(),
        checkpoint=newest.folder if newest else None,
        outcome=outcome,
    )
    write_summary(project.state_dir / SUMMARY_FILE, content)
    log.info("ended after step %d: %s", outcome.step, outcome.ended)
