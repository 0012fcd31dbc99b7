"""The training loop: starts what the schedule asks for and tells it what came of it.

All decisions are in `schedule`; here are the waiting, the files and the gateway. Everything that goes on is a task that
ends in an event of the schedule; a task that fails ends the run. What is trained becomes durable with the checkpoint
that holds it, so whatever kills the trainer, the next one goes on from the newest checkpoint, finds the rollouts
enqueued since by their ids, and trains none of them twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from agl_runtime.algorithms.advantages import Algorithm
from agl_runtime.client import GatewayClient
from agl_runtime.config import Config, Project
from agl_runtime.samples.build import build_samples
from agl_runtime.samples.types import Limits
from agl_runtime.schemas import PolicyVersion, Rollout
from agl_runtime.trainer import diagnosis, schedule, state
from agl_runtime.trainer.data import Task, TaskOrder
from agl_runtime.trainer.measure import measure
from agl_runtime.trainer.metrics import Age, Line, MetricsLog, Outcome, Times, step_line, tokens_per_s, validation_line
from agl_runtime.trainer.policy import Policy, TimedUpdate
from agl_runtime.trainer.progress import Progress
from agl_runtime.trainer.rollouts import Ended, RolloutDesk, Work, is_orphan, of_lineage, recipe
from agl_runtime.trainer.schedule import Group, Phase
from agl_runtime.trainer.scoring import Candidate, Scores, score

NO_GRADIENT = "the backend found no gradient in the batch"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tasks:
    train: TaskOrder
    val: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a loop works with; the policy serves already."""

    project: Project
    client: GatewayClient
    policy: Policy
    tasks: Tasks
    run: state.Run
    run_epoch: int
    metrics: MetricsLog
    progress: Progress


def plan_of(config: Config, *, validates: bool) -> schedule.Plan:
    train = config.train
    return schedule.Plan(
        steps=train.steps,
        batch=train.groups_per_step,
        active=train.active_groups or train.groups_per_step,
        max_staleness=train.max_staleness,
        save_every=train.save_every,
        validates=validates,
        validate_every=config.eval.every,
        no_signal_steps=train.no_signal_steps,
    )


class TrainingLoop:
    """One run of one process, from a schedule state to the end. `run` is called once."""

    def __init__(self, context: RunContext) -> None:
        self._at = context
        self._config = context.project.config
        self._client = context.client
        self._policy = context.policy
        self._progress = context.progress
        self._begun = context.policy.version
        self._plan = plan_of(self._config, validates=bool(context.tasks.val))
        self._recipe = recipe(self._config)
        self._limits = Limits(self._config.train.max_prompt_tokens, self._config.train.max_response_tokens)
        self._desk = RolloutDesk(self._client, self._config.agent.timeout_s)
        self._going: set[asyncio.Task[schedule.Event]] = set()
        self._finished: dict[int, list[tuple[Ended, Candidate]]] = {}
        self._consumed: list[str] = []
        self._unlearnt: list[Ended] = []
        self._dropped = 0
        self._line: Line | None = None
        self._sampling_since = 0.0
        self._state = schedule.State()
        self._outcome: Outcome | None = None

    async def run(self, begin_at: schedule.State, stop: asyncio.Event) -> Outcome:
        """Raises AglError when something fails for good."""
        self._state = replace(begin_at, stopping=stop.is_set())
        try:
            await self._desk.open()
            self._go(self._desk.watch())
            self._go(self._progress.report(self._client, self._policy.announce))
            self._go(_asked(stop))
            await self._desk.cancel(self._orphans())
            await self._move(schedule.begin(self._plan, self._state))
            while self._outcome is None:
                done, _ = await asyncio.wait(self._going, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._going.discard(task)
                    await self._move(schedule.advance(self._plan, self._state, task.result()))
            return self._outcome
        finally:
            for task in self._going:
                task.cancel()
            await asyncio.gather(*self._going, return_exceptions=True)

    async def _move(self, move: schedule.Move) -> None:
        self._state, actions = move
        if self._state.phase not in (Phase.UPDATING, Phase.SAVING):
            self._write_line()
        if self._state.phase is Phase.SAMPLING:
            self._progress.sampling(len(self._state.ready), self._plan.batch)
        fresh = [action.group for action in actions if isinstance(action, schedule.Enqueue)]
        if fresh:
            await self._enqueue(fresh)
        for action in actions:
            match action:
                case schedule.Update(groups):
                    self._write_line()
                    self._go(self._update(groups))
                case schedule.Save():
                    self._go(self._save(self._state))
                case schedule.Validate():
                    self._go(self._validate(self._state.step, self._state.version))
                case schedule.Drop(group):
                    self._dropped += 1
                    self._finished.pop(group.number, None)
                    await self._desk.end(self._training(group).rollout_ids)
                case schedule.Finish(ended):
                    self._outcome = self._end(ended)

    def _go(self, work: Coroutine[Any, Any, schedule.Event]) -> None:
        self._going.add(asyncio.create_task(work))

    async def _enqueue(self, groups: Sequence[Group]) -> None:
        if len(groups) == len(self._state.open):  # nothing carried over
            self._sampling_since = time.monotonic()
        work = [self._training(group) for group in groups]
        await self._desk.enqueue(work)
        for group, item in zip(groups, work, strict=True):
            self._go(self._follow(group, item))

    async def _follow(self, group: Group, work: Work) -> schedule.Event:
        ended = await self._desk.results(work, lambda item: self._progress.sampled(item.sampled_tokens))
        samples = [
            build_samples(of_lineage(item.calls, self._begun), self._limits, self._policy.decode) for item in ended
        ]
        if self._state.is_open(group.number):  # it is not dropped
            self._finished[group.number] = [
                (item, Candidate(work.group_id, item.reward, rows, item.error))
                for item, rows in zip(ended, samples, strict=True)
            ]
        return schedule.GroupFinished(group.number)

    async def _update(self, groups: Sequence[Group]) -> schedule.Event:
        sample_s = time.monotonic() - self._sampling_since
        self._progress.enter(Phase.UPDATING)
        members = [pair for group in groups for pair in self._finished.pop(group.number)]
        ended = [item for item, _ in members]
        scores = score([candidate for _, candidate in members], cast(Algorithm, self._config.train.algorithm))
        timed = await self._policy.update(scores.rollouts, scores.totals) if scores.rollouts else None
        age = Age(tuple(self._state.staleness(group) for group in groups), self._dropped)
        self._dropped = 0
        version = self._state.version
        if timed and timed.result.version.updates > version.updates:
            version = timed.result.version
        elif timed:
            scores = replace(scores, skipped=NO_GRADIENT)
        self._consumed += [item.rollout_id for item in ended]
        self._note(ended, scores, timed, sample_s, version, age)
        self._sampling_since = time.monotonic()
        return schedule.Updated(version)

    def _note(
        self,
        ended: Sequence[Ended],
        scores: Scores,
        timed: TimedUpdate | None,
        sample_s: float,
        version: PolicyVersion,
        age: Age,
    ) -> None:
        step = self._state.step + 1
        if scores.skipped:
            log.warning("step %d is skipped: %s", step, scores.skipped)
        if not version.updates:
            self._unlearnt += ended
        times = Times(sample_s, timed.hold_s, timed.update_s) if timed else Times(sample_s)
        figures = timed.result.metrics if timed else {}
        self._line = step_line(step, version, ended, scores, figures, times, age)
        self._progress.detail |= {
            "step": step,
            "version": str(version),
            "reward": self._line["reward_mean"],
            "tokens_per_s": tokens_per_s(self._line),
        }

    async def _save(self, at: schedule.State) -> schedule.Event:
        self._progress.enter(Phase.SAVING)
        began = time.monotonic()
        folder = state.checkpoint_folder(self._at.project.state_dir, at.version)
        saved = state.SavedState.of(self._at.run.run_id, self._at.run_epoch, at, self._consumed, self._line)
        if at.version == at.saved:
            saved = state.note_steps(folder, saved)
        else:
            await self._policy.save(folder, saved.model_dump(mode="json"))
        self._write_line(save_s=round(time.monotonic() - began, 4))
        await self._client.record_checkpoint(saved.record(folder))
        self._consumed = []
        state.prune_checkpoints(self._at.project.state_dir, self._at.run.run_id, self._config.train.keep_checkpoints)
        return schedule.Saved()

    async def _validate(self, step: int, version: PolicyVersion) -> schedule.Event:
        tasks = enumerate(self._at.tasks.val)
        work = [self._work(f"val{n}", version, task, step, is_train=False) for n, task in tasks]
        measured = await measure(self._desk, work, self._progress)
        if measured.result is None:
            log.warning("the validation at step %d says nothing: no rollout got a reward", step)
        else:
            line = validation_line(step, version, measured.result, measured.ended, measured.seconds)
            self._at.metrics.append(line)
        return schedule.Validated()

    def _write_line(self, **more: float) -> None:
        if self._line is not None:
            self._at.metrics.append({**self._line, **more})
            self._line = None

    def _end(self, ended: schedule.Ended) -> Outcome:
        reason = None
        if ended == "no_signal":
            skipped = [line["skipped"] for line in self._at.metrics.lines if line["kind"] == "step"]
            reason = diagnosis.no_signal(self._unlearnt, skipped)
            log.warning("%s", reason)
        return Outcome(ended, self._state.step, self._state.version, reason)

    def _work(self, place: str, version: PolicyVersion, task: Task, step: int, *, is_train: bool) -> Work:
        size = self._config.train.group_size if is_train else self._config.eval.samples
        return Work(self._at.run.run_id, version, place, task, size, step, is_train, self._recipe)

    def _training(self, group: Group) -> Work:
        task = self._at.tasks.train.at(group.number)
        return self._work(str(group.number), group.version, task, self._state.step + 1, is_train=True)

    def _orphans(self) -> Callable[[Rollout], bool]:
        carried = {self._training(group).group_id for group in self._state.open}
        run_id, version = self._at.run.run_id, self._state.version
        return lambda rollout: is_orphan(rollout, run_id, version, self._recipe, carried)


async def _asked(stop: asyncio.Event) -> schedule.Event:
    await stop.wait()
    return schedule.StopAsked()
