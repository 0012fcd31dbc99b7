"""A gateway without HTTP: what the trainer sees of one, with agents that a test plays.

`agent` says how each rollout ends; None leaves it to `end`. Every call of the trainer goes through `before`, which may
raise: a trainer killed at any moment of its dealings with the world.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agl_runtime.calls import Call, RolloutCalls
from agl_runtime.errors import ConflictError, NotFoundError
from agl_runtime.schemas import (
    TERMINAL_STATES,
    CheckpointRecord,
    Event,
    Model,
    PartStatus,
    ProxyState,
    Rollout,
    RolloutCreate,
    RolloutDetail,
    RolloutState,
    RolloutStatus,
    TerminalItem,
    TerminalPage,
)
from fakes.trained import make_call


@dataclass(frozen=True)
class End:
    """How a rollout ends. `reward` None is an infrastructure failure."""

    reward: float | None = 0.0
    error: str | None = None
    calls: int = 1
    untrainable: str | None = None
    cpu_s: float | None = 0.25


Agent = Callable[[Rollout], End | None]


def by_index(rollout: Rollout) -> End:
    """The rollouts of a group get rewards 0, 1, 0, 1, ..."""
    return End(float(_extra(rollout)["index"] % 2))


def _extra(rollout: Rollout) -> dict[str, Any]:
    return dict(rollout.metadata.model_extra or {})


@dataclass
class FakeGateway:
    agent: Agent = by_index
    before: Callable[[str], None] = lambda name: None
    rollouts_by_id: dict[str, Rollout] = field(default_factory=dict)
    ends: dict[str, End] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)
    named: list[Model] = field(default_factory=list)
    records: dict[str, CheckpointRecord] = field(default_factory=dict)
    statuses: list[PartStatus] = field(default_factory=list)
    known_parts: dict[str, PartStatus] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    is_paused: bool = False
    inflight: int = 0
    deleted: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> FakeGateway:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    # what the test does

    def end(self, rollout_id: str, end: End) -> None:
        """The agent of this rollout is done."""
        rollout = self.rollouts_by_id[rollout_id]
        self._set(rollout, RolloutState.FAILED if end.reward is None else RolloutState.SUCCEEDED, end.error)
        self.ends[rollout_id] = end

    async def end_in_any_order(self, rng: random.Random) -> None:
        """One agent, any of those at work, is done whenever the trainer asks for something; for ever."""
        while True:
            self.asked.clear()
            await self.asked.wait()
            if waiting := self.unfinished():
                rollout_id = rng.choice(waiting)
                self.end(rollout_id, by_index(self.rollouts_by_id[rollout_id]))

    def forget(self) -> None:
        """The gateway began anew: what it kept in memory is gone."""
        self.models, self.known_parts, self.is_paused = [], {}, False

    def unfinished(self) -> list[str]:
        return [name for name, item in self.rollouts_by_id.items() if item.status.state not in TERMINAL_STATES]

    # what the trainer calls

    async def add_rollouts(self, items: Sequence[RolloutCreate]) -> list[Rollout]:
        self._enter("add_rollouts")
        return [self._add(item) for item in items]

    async def rollout(self, rollout_id: str) -> RolloutDetail:
        self._enter("rollout")
        self._require(rollout_id)
        return RolloutDetail(rollout=self.rollouts_by_id[rollout_id], attempts=["0"])

    async def rollouts(self, states: Sequence[RolloutState], limit: int = 500) -> list[Rollout]:
        self._enter("rollouts")
        return [item for item in self.rollouts_by_id.values() if item.status.state in states][:limit]

    async def terminal(self, after: int, *, limit: int = 1000, wait_s: float = 0.0) -> TerminalPage:
        self._enter("terminal")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(self.order) <= after:
                    self.changed.clear()
                    await self.changed.wait()
        names = self.order[after : after + limit]
        items = [
            TerminalItem(
                rollout_id=name,
                state=self.rollouts_by_id[name].status.state,
                data_id="",
                is_train=self.rollouts_by_id[name].is_train,
            )
            for name in names
        ]
        return TerminalPage(items=items, next_after=after + len(items), total_terminal=len(self.order))

    async def finish(self, rollout_id: str, state: RolloutState, error_message: str | None = None) -> None:
        self._enter("finish")
        self._require(rollout_id)
        if self.rollouts_by_id[rollout_id].status.state in TERMINAL_STATES:
            raise ConflictError(f"rollout {rollout_id} has ended", status=409)
        self._set(self.rollouts_by_id[rollout_id], state, error_message)
        self.ends[rollout_id] = End(None)

    async def events(self, rollout_id: str, *, event_type: str | None = None) -> list[Event]:
        self._enter("events")
        assert event_type == "agent_exit"
        cpu_s = self.ends[rollout_id].cpu_s
        data = {"exit_code": 0, "cpu_s": cpu_s, "max_rss_mb": 40.0}
        event = Event(event_type=event_type, rollout_id=rollout_id, attempt_id="0", timestamp=0.0, data=data)
        return [event] if cpu_s is not None else []

    async def calls(self, rollout_id: str) -> RolloutCalls:
        self._enter("calls")
        if self.deleted:
            self.deleted -= 1
            raise NotFoundError(f"There is no rollout {rollout_id}.", status=404)
        self._require(rollout_id)
        end = self.ends[rollout_id]
        return RolloutCalls(rollout_id, "0", tuple(_calls(rollout_id, end)), end.reward)

    async def register_model(self, model: Model) -> None:
        self._enter("register_model")
        self.models = [item for item in self.models if item.endpoint != model.endpoint] + [model]
        self.named.append(model)

    async def clear_models(self) -> None:
        self._enter("clear_models")
        self.models = []

    async def pause(self, reason: str) -> ProxyState:
        self._enter("pause")
        self.is_paused = True
        return await self.proxy_state()

    async def resume(self) -> ProxyState:
        self._enter("resume")
        self.is_paused = False
        return await self.proxy_state()

    async def proxy_state(self, *, drained_wait_s: float = 0.0) -> ProxyState:
        self._enter("proxy_state")
        return ProxyState(paused=self.is_paused, retry_after_seconds=5, reason=None, inflight=self.inflight)

    async def record_checkpoint(self, record: CheckpointRecord) -> None:
        self._enter("record_checkpoint")
        self.records[record.version] = record

    async def report(self, status: PartStatus) -> None:
        self.statuses.append(status)
        self.known_parts[status.part] = status

    async def parts(self) -> list[PartStatus]:
        return list(self.known_parts.values())

    def _enter(self, name: str) -> None:
        self.before(name)
        self.log.append(name)
        self.asked.set()

    def _require(self, rollout_id: str) -> None:
        if rollout_id not in self.rollouts_by_id:
            raise NotFoundError(f"There is no rollout {rollout_id}.", status=404)

    def _add(self, item: RolloutCreate) -> Rollout:
        name = str(item.rollout_id)
        if name not in self.rollouts_by_id:
            now = time.time()
            rollout = Rollout(
                rollout_id=name,
                input=item.input,
                is_train=item.is_train,
                config=item.config,
                metadata=item.metadata,
                status=RolloutStatus(created_at=now, updated_at=now),
            )
            self.rollouts_by_id[name] = rollout
            end = self.agent(rollout)
            if end is not None:
                self.end(name, end)
        return self.rollouts_by_id[name]

    def _set(self, rollout: Rollout, state: RolloutState, error: str | None) -> None:
        status = rollout.status.model_copy(update={"state": state, "error_message": error})
        self.rollouts_by_id[rollout.rollout_id] = rollout.model_copy(update={"status": status})
        self.order.append(rollout.rollout_id)
        self.changed.set()


def _calls(rollout_id: str, end: End) -> list[Call]:
    return [make_call(rollout_id, f"c{n}", reason=end.untrainable) for n in range(end.calls)]
