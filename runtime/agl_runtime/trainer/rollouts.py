"""Rollouts as the trainer sees them: named, enqueued, waited for and fetched, all through the gateway's client.

A rollout's id is a function of what decides its outcome's distribution (run, weights, place in the data's order, task,
recipe) and its index. So whoever enqueues the same work again, after whatever crash, finds the rollouts that exist
already; and work that changed in between (other weights, another agent command) never meets old results. Nor does it
meet what a trainer ended because nobody needed it: if somebody does after all, that is enqueued anew under another id.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import orjson

from agl_runtime.calls import RolloutCalls, VersionSpan
from agl_runtime.client import GatewayClient
from agl_runtime.config import Config
from agl_runtime.errors import ConflictError, NotFoundError
from agl_runtime.schemas import (
    TERMINAL_STATES,
    PolicyVersion,
    Rollout,
    RolloutConfig,
    RolloutCreate,
    RolloutMetadata,
    RolloutState,
)
from agl_runtime.trainer.data import Task

POLL_WAIT_S = 20.0
PAGE = 1000
CHUNK = 100
FETCHES = 8
ERROR_CHARS = 200
REWARD_LIMIT = 1e100  # sums and squares of rewards within it stay finite
EVAL_RUN = "eval-"  # what the run id of a measurement begins with
NO_REWARD = "ended without a reward"
NOT_NEEDED = "The trainer no longer needs it."
DELETED = "deleted from the store before the trainer had read it"
UNENDED = (RolloutState.QUEUING, RolloutState.RUNNING)


@dataclass(frozen=True, slots=True)
class Work:
    """The rollouts of one task under one set of weights. `place` is unique within run and weights."""

    run_id: str
    version: PolicyVersion
    place: str
    task: Task
    size: int
    step: int
    is_train: bool
    recipe: str

    @property
    def group_id(self) -> str:
        digest = hashlib.blake2b(orjson.dumps([self.recipe, self.task.data]), digest_size=4).hexdigest()
        return f"{self.run_id}-{self.version}-{self.place}-{digest}"

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        return tuple(f"{self.group_id}-{index}" for index in range(self.size))

    def creates(self, timeout_s: float) -> list[RolloutCreate]:
        about = {
            "run_id": self.run_id,
            "group_id": self.group_id,
            "task_id": self.task.task_id,
            "step": self.step,
            "weights": str(self.version),
            "recipe": self.recipe,
        }
        return [
            RolloutCreate(
                input=self.task.data,
                is_train=self.is_train,
                config=RolloutConfig(timeout_seconds=math.ceil(timeout_s)),
                metadata=RolloutMetadata.model_validate({**about, "index": index}),
                rollout_id=rollout_id,
            )
            for index, rollout_id in enumerate(self.rollout_ids)
        ]


class Result(Protocol):
    """What metrics and diagnosis look at of a rollout that has ended; see `Ended`."""

    @property
    def reward(self) -> float | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def agent_error(self) -> str | None: ...
    @property
    def cpu_s(self) -> float | None: ...
    @property
    def rss_mb(self) -> float | None: ...
    @property
    def call_count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Ended:
    """A rollout that has ended. `reward` is within REWARD_LIMIT, or None with the reason in `error`; `agent_error` says
    how the agent of a scored one failed; `cpu_s` and `rss_mb` (MiB, the most) are what it used, None where the
    controller did not say."""

    rollout_id: str
    reward: float | None
    calls: RolloutCalls
    error: str | None = None
    agent_error: str | None = None
    cpu_s: float | None = None
    rss_mb: float | None = None

    @property
    def call_count(self) -> int:
        return len(self.calls.calls)

    @property
    def sampled_tokens(self) -> int:
        return sum(call.sampled_ids.size for call in self.calls.calls)


def recipe(config: Config) -> str:
    """Digest of the settings beside the weights that decide what a rollout is."""
    parts = [
        config.agent.model_dump(mode="json", include={"command", "env", "workspace", "timeout_s", "reports_reward"}),
        config.reward.function,
        config.model.max_tokens,
        config.train.temperature,
        config.eval.temperature,
    ]
    return hashlib.blake2b(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS), digest_size=4).hexdigest()


class RolloutDesk:
    """Enqueues work and hands back what became of it. `watch` must run meanwhile."""

    def __init__(self, client: GatewayClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._after = 0
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._stored: set[str] = set()
        self._anew: dict[str, str] = {}
        self._fetches = asyncio.Semaphore(FETCHES)

    async def open(self) -> None:
        """Skip what ended before now; `enqueue` sees for itself whether a rollout has ended."""
        while (page := await self._client.terminal(self._after, limit=PAGE)).items:
            self._after = page.next_after

    async def watch(self) -> NoReturn:
        """Follow the gateway's list of ended rollouts, for ever, and look for deleted ones, which never end."""
        looked_at = time.monotonic()
        while True:
            page = await self._client.terminal(self._after, limit=PAGE, wait_s=POLL_WAIT_S)
            self._after = page.next_after
            for item in page.items:
                self._resolve(item.rollout_id)
            if time.monotonic() - looked_at >= POLL_WAIT_S:
                await self._resolve_deleted()
                looked_at = time.monotonic()

    async def enqueue(self, work: Sequence[Work]) -> None:
        """In the order given; rollouts that exist already are left as they are, but for those that `end` ended."""
        creates = [create for item in work for create in item.creates(self._timeout_s)]
        for start in range(0, len(creates), CHUNK):
            chunk = {str(create.rollout_id): create for create in creates[start : start + CHUNK]}
            for turn in itertools.count(1):
                unneeded = await self._add(chunk.values())
                chunk = {
                    name: create.model_copy(update={"rollout_id": f"{name}-{turn}"})
                    for name, create in chunk.items()
                    if create.rollout_id in unneeded
                }
                if not chunk:
                    break
                self._anew |= {name: str(create.rollout_id) for name, create in chunk.items()}

    async def _add(self, creates: Collection[RolloutCreate]) -> set[str]:
        """Ids of those that a trainer ended before; they are not waited for."""
        unneeded = set()
        for create in creates:
            self._waiting.setdefault(str(create.rollout_id), asyncio.get_running_loop().create_future())
        for rollout in await self._client.add_rollouts(list(creates)):
            if rollout.status.error_message == NOT_NEEDED:
                unneeded.add(rollout.rollout_id)
                del self._waiting[rollout.rollout_id]
                continue
            self._stored.add(rollout.rollout_id)
            if rollout.status.state in TERMINAL_STATES:
                self._resolve(rollout.rollout_id)
        return unneeded

    async def results(self, work: Work, progress: Callable[[Ended], None] | None = None) -> list[Ended]:
        """Wait for every rollout of work that was enqueued, each fetched as soon as it has ended."""
        return list(await asyncio.gather(*(self._result(name, progress) for name in work.rollout_ids)))

    async def cancel(self, is_orphan: Callable[[Rollout], bool]) -> None:
        """End those waiting and running rollouts that nobody waits for any more."""
        while found := [item for item in await self._client.rollouts(UNENDED, limit=PAGE) if is_orphan(item)]:
            await self.end(item.rollout_id for item in found)

    async def end(self, rollout_ids: Iterable[str]) -> None:
        """Of rollouts that nobody needs any more, end those that have not ended."""
        for name in rollout_ids:
            with contextlib.suppress(ConflictError, NotFoundError):  # it has ended by itself, or is deleted
                await self._client.finish(self._anew.get(name, name), RolloutState.FAILED, NOT_NEEDED)

    async def _result(self, name: str, progress: Callable[[Ended], None] | None) -> Ended:
        rollout_id = self._anew.get(name, name)
        await self._waiting[rollout_id]
        async with self._fetches:
            ended = await self._fetch(rollout_id)
        del self._waiting[rollout_id]
        self._stored.discard(rollout_id)
        if progress is not None:
            progress(ended)
        return ended

    async def _fetch(self, rollout_id: str) -> Ended:
        try:
            calls = await self._client.calls(rollout_id)
        except NotFoundError:
            return Ended(rollout_id, None, RolloutCalls(rollout_id, "", (), None), DELETED)
        exits = await self._client.events(rollout_id, event_type="agent_exit")
        used = exits[-1].data if exits else {}
        reward, error = calls.reward, None
        if reward is None:
            error = (await self._client.rollout(rollout_id)).rollout.status.error_message or NO_REWARD
        elif not abs(reward) <= REWARD_LIMIT:  # nor is NaN
            reward, error = None, f"its reward is {reward:g}, which is not within +-{REWARD_LIMIT:g}"
        return Ended(rollout_id, reward, calls, error, agent_error(used), used.get("cpu_s"), used.get("max_rss_mb"))

    async def _resolve_deleted(self) -> None:
        there = {item.rollout_id for item in await self._client.rollouts(UNENDED, limit=PAGE)}
        for rollout_id in self._stored - there:  # most of them have ended, or are beyond the page
            try:
                await self._client.rollout(rollout_id)
            except NotFoundError:
                self._resolve(rollout_id)

    def _resolve(self, rollout_id: str) -> None:
        future = self._waiting.get(rollout_id)
        if future is not None and not future.done():
            future.set_result(None)


def agent_error(ending: Mapping[str, Any]) -> str | None:
    """How an agent failed, from the data of its `agent_exit`: "ended with exit code 1: <the last line it wrote>"."""
    if ending.get("timed_out"):
        return "ran into its time limit"
    if not ending.get("signal") and not ending.get("exit_code"):
        return None
    how = f"was ended by signal {n}" if (n := ending.get("signal")) else f"ended with exit code {ending['exit_code']}"
    lines = str(ending.get("stderr_tail") or "").strip().splitlines()
    return f"{how}: {lines[-1][:ERROR_CHARS]}" if lines else how


def is_orphan(
    rollout: Rollout, run_id: str, version: PolicyVersion, recipe: str, carried: Collection[str] = ()
) -> bool:
    """Whether a trainer enqueued it (and not somebody who uses the gateway directly), but neither in one of the groups
    `carried` nor for this run, these weights and this recipe."""
    about = rollout.metadata.model_extra or {}
    if "weights" not in about or about.get("group_id") in carried:
        return False
    return (about.get("run_id"), about["weights"], about.get("recipe")) != (run_id, str(version), recipe)


def is_left_measurement(rollout: Rollout, run_id: str) -> bool:
    """Whether another `agl eval` than the one of this run id enqueued it. What a training run enqueued stays: that run
    finds it again when it goes on."""
    about = rollout.metadata.model_extra or {}
    named = str(about.get("run_id", ""))
    return not rollout.is_train and "weights" in about and named.startswith(EVAL_RUN) and named != run_id


def of_lineage(calls: RolloutCalls, begun: PolicyVersion) -> RolloutCalls:
    """`calls` with -1 updates where weights sampled that are lost: those made after the checkpoint that the weights
    `begun` come from, by a process that a crash ended. Their numbers of updates now name other weights."""

    def is_lost(version: PolicyVersion) -> bool:
        return version.epoch < begun.epoch and version.updates > begun.updates

    def named(span: VersionSpan) -> VersionSpan:
        return replace(span, version=span.version._replace(updates=-1)) if is_lost(span.version) else span

    if not any(is_lost(span.version) for call in calls.calls for span in call.spans):
        return calls
    return replace(calls, calls=tuple(replace(call, spans=tuple(map(named, call.spans))) for call in calls.calls))
