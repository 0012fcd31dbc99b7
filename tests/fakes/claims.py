"""A gateway without HTTP as the controller sees it, and grants.

`add` enqueues; claims wait for it. What the controller did stands in `log`, in order, and in `events` and `states`.
`before` is called with a method's name and may raise or wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agl_runtime.calls import Call, CallInfo, RolloutCalls, ids_array
from agl_runtime.schemas import (
    ClaimRequest,
    Event,
    Grant,
    LeaseRenewal,
    LeaseState,
    NextAttempt,
    PartStatus,
    Rollout,
    RolloutConfig,
    RolloutState,
    RolloutStatus,
)


def granted(
    rollout_id: str = "r1", task: Any = None, *, attempt_id: str = "0", is_train: bool = True, timeout_s: int = 3600
) -> Grant:
    rollout = Rollout(
        rollout_id=rollout_id,
        input={"q": 1} if task is None else task,
        is_train=is_train,
        config=RolloutConfig(timeout_seconds=timeout_s),
        status=RolloutStatus(state=RolloutState.RUNNING, created_at=0.0, updated_at=0.0),
    )
    return Grant(rollout=rollout, attempt_id=attempt_id, agent_key="agent-key")


async def _nothing(name: str) -> None:
    return None


@dataclass
class FakeClaims:
    before: Callable[[str], Awaitable[None]] = _nothing
    queue: list[Grant] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    held_total_s: float = 0.0
    gateway: str = "first"
    failures: list[dict[str, Any]] = field(default_factory=list)
    served: list[CallInfo] = field(default_factory=list)
    incomplete: tuple[str, ...] = ()
    log: list[tuple[str, ...]] = field(default_factory=list)
    claims: list[ClaimRequest] = field(default_factory=list)
    events_posted: list[Event] = field(default_factory=list)
    states: dict[str, tuple[RolloutState, str | None]] = field(default_factory=dict)
    statuses: list[PartStatus] = field(default_factory=list)
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def add(self, *grants: Grant) -> None:
        async with self.moved:
            self.queue += grants
            self.moved.notify_all()

    async def until(self, happened: Callable[[], object]) -> None:
        """Wait for what the controller brings about."""
        async with asyncio.timeout(30):
            while not happened():
                await asyncio.sleep(0.001)

    async def claim(self, request: ClaimRequest) -> list[Grant]:
        await self._note("claim")
        self.claims.append(request)
        async with self.moved:
            await self.moved.wait_for(lambda: self.queue)
            taken, self.queue = self.queue[: request.limit], self.queue[request.limit :]
        return taken

    async def renew(self, renewal: LeaseRenewal) -> LeaseState:
        await self._note("renew")
        lost = sorted(self.lost & set(renewal.rollout_ids))
        return LeaseState(lost=lost, held_total_s=self.held_total_s, gateway=self.gateway)

    async def next_attempt(self, rollout_id: str, request: NextAttempt) -> Grant:
        await self._note("next_attempt", rollout_id, request.after)
        return granted(rollout_id, attempt_id=str(int(request.after) + 1))

    async def seal(self, rollout_id: str, attempt_id: str) -> None:
        await self._note("seal", rollout_id, attempt_id)

    async def end_attempt(self, rollout_id: str, attempt_id: str, exit_data: Mapping[str, Any]) -> list[Event]:
        await self.seal(rollout_id, attempt_id)
        await self.add_event(rollout_id, attempt_id, "agent_exit", exit_data)
        return await self.events(rollout_id, event_type="upstream_failure")

    async def add_event(self, rollout_id: str, attempt_id: str, event_type: str, data: Mapping[str, Any]) -> None:
        event = Event(
            event_type=event_type, rollout_id=rollout_id, attempt_id=attempt_id, timestamp=0.0, data=dict(data)
        )
        self.events_posted.append(event)
        await self._note(event_type, rollout_id, attempt_id)

    async def events(self, rollout_id: str, *, event_type: str | None = None) -> list[Event]:
        failures = [
            Event(event_type="upstream_failure", rollout_id=rollout_id, attempt_id="0", timestamp=0.0, data=data)
            for data in self.failures
        ]
        return [each for each in (*failures, *self.events_posted) if event_type in (None, each.event_type)]

    async def calls(self, rollout_id: str) -> RolloutCalls:
        none = ids_array([])
        calls = tuple(Call(info, none, none, none.astype("float32")) for info in self.served)
        return RolloutCalls(rollout_id, "0", calls, None, self.incomplete)

    async def finish(self, rollout_id: str, state: RolloutState, error_message: str | None = None) -> None:
        self.states[rollout_id] = (state, error_message)
        await self._note("finish", rollout_id)

    async def report(self, status: PartStatus) -> None:
        self.statuses.append(status)
        await self._note("report")

    async def _note(self, *words: str) -> None:
        if words[0] not in ("claim", "renew", "report"):
            self.log.append(words)
        await self.before(words[0])
