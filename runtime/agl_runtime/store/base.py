"""What is durable, as a Protocol: every implementation passes `tests/contract/test_store_contract.py`.

All methods are safe to call from one asyncio event loop. A method returns only when what it wrote is committed to disk
(concurrent writes share one commit). Times are seconds since the epoch. Nothing here knows HTTP or an algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agl_runtime.calls import CallInfo, Experts, Ids, LogProbs, PackedCall, VersionSpan
from agl_runtime.schemas import (
    CheckpointRecord,
    Event,
    Model,
    Rollout,
    RolloutCreate,
    RolloutState,
    RolloutStatusPatch,
    TerminalPage,
)

AttemptState = Literal["uncalled", "called", "sealed"]
"""Of an attempt that is not sealed: whether any of its calls has begun."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A call about to be sent on. `request` is the dialect's body as the harness sent it (JSON object). `is_long` says
    that it takes time to write: it is large, or the first since a restart of an attempt that has calls."""

    call_id: str
    rollout_id: str
    attempt_id: str
    dialect: str
    model: str
    request: dict[str, Any]
    kind: str = "main"
    parent_id: str | None = None
    retry_key: str | None = None
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """What came back. Arrays are empty where the server gave none. `response` is the answer the harness gets. `routed`:
    see `Answer`."""

    call_id: str
    response: dict[str, Any]
    prompt_ids: Ids
    sampled_ids: Ids
    logprobs: LogProbs
    spans: tuple[VersionSpan, ...]
    trainable: bool
    reason: str | None
    finish_reason: str | None
    http_status: int
    upstream: Model | None
    latency_ms: float
    retry_count: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    side: dict[str, Any] = field(default_factory=dict)
    routed: Experts | None = None


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call for reading: request and response rebuilt whole, images put back; `packed` is without routing."""

    info: CallInfo
    created_at: float
    request: dict[str, Any]
    response: dict[str, Any] | None
    packed: PackedCall | None
    upstream: Model | None
    latency_ms: float | None
    retry_count: int
    usage: dict[str, Any]
    side: dict[str, Any] = field(default_factory=dict)


class Store(Protocol):
    async def open(self) -> None: ...
    async def close(self) -> None: ...

    # rollouts
    async def add_rollouts(self, items: Sequence[RolloutCreate]) -> list[Rollout]:
        """Enqueue; an id that exists returns the stored rollout unchanged. All or none."""
        ...

    async def get_rollout(self, rollout_id: str) -> Rollout:
        """Raises NotFoundError."""
        ...

    async def list_rollouts(self, states: Sequence[RolloutState], limit: int) -> list[Rollout]:
        """In order of creation."""
        ...

    async def patch_rollout(self, rollout_id: str, patch: RolloutStatusPatch) -> Rollout:
        """Raises NotFoundError, and ConflictError for a forbidden transition. Ending a rollout seals its attempts
        and releases its lease."""
        ...

    async def delete_rollout(self, rollout_id: str) -> None:
        """With its events and calls; a missing id is no error."""
        ...

    async def terminal_page(self, after: int, limit: int) -> TerminalPage: ...

    # leases and attempts
    async def claim(
        self, controller_id: str, limit: int, lease_s: float, held: Sequence[str] = ()
    ) -> list[tuple[Rollout, str]]:
        """Take queuing rollouts, running ones whose lease ran out and those leased to this controller that `held` does
        not name, oldest first. Each becomes running under a fresh attempt id ("0", "1", ...); the attempt before it
        is sealed. Running rollouts without any lease (a v1.0 controller runs them) are left alone. One transaction."""
        ...

    async def renew(self, controller_id: str, rollout_ids: Sequence[str], lease_s: float) -> list[str]:
        """Returns the ids that this controller no longer holds."""
        ...

    async def next_attempt(self, rollout_id: str, controller_id: str, after: str) -> str:
        """Seal the attempt `after` and begin another; when another has begun already, return that one. Raises
        ConflictError unless this controller holds the lease."""
        ...

    async def seal(self, rollout_id: str, attempt_id: str) -> None:
        """Late calls of a sealed attempt are refused; sealing twice is no error."""
        ...

    async def attempt_state(self, rollout_id: str, attempt_id: str) -> AttemptState:
        """Any attempt of a rollout that has ended is sealed. Raises NotFoundError."""
        ...

    async def attempts(self, rollout_id: str) -> list[str]:
        """In order of their beginning: those begun by a claim and those that only have events or calls."""
        ...

    # events
    async def add_event(
        self, rollout_id: str, attempt_id: str, event_type: str, data: dict[str, Any], event_id: str | None = None
    ) -> Event:
        """Raises NotFoundError. Events of a sealed attempt are kept (a reward comes after sealing). The same
        `event_id` again, in the same attempt, returns the first event."""
        ...

    async def events(self, rollout_id: str, attempt_id: str | None = None) -> list[Event]:
        """Of one attempt (the last by default), oldest first, model calls not included."""
        ...

    # calls. A CallInfo says what holds now: a call committed as trainable reads as untrainable (`undelivered`,
    # `superseded`) until it is delivered or a call committed later continues it.
    async def begin_call(self, intent: Intent) -> None:
        """Durable before the call is sent on. Raises NotFoundError, ConflictError when the attempt is sealed or the
        id is taken, StoreError when the request is no plain JSON."""
        ...

    async def commit_call(self, commit: Commit) -> None:
        """Durable before the answer's last byte. `response` is kept whole, so it should not repeat the prompt's ids.
        Raises NotFoundError, ConflictError when the attempt was sealed meanwhile or the call is committed already."""
        ...

    async def mark_delivered(self, call_id: str) -> None:
        """The answer's last byte went out. A call that is gone, or not committed, is no error."""
        ...

    async def find_retry(self, rollout_id: str, attempt_id: str, retry_key: str) -> StoredCall | None:
        """The newest call of this attempt that carries `retry_key`, committed or not."""
        ...

    async def calls(self, rollout_id: str, attempt_id: str | None = None) -> list[StoredCall]:
        """Of one attempt (the last by default), in order of `seq`, requests and responses whole."""
        ...

    async def packed_calls(self, rollout_id: str) -> tuple[str, list[PackedCall], list[str]]:
        """(attempt id, committed calls in order of commit, ids of intents without commit) of the last attempt."""
        ...

    # the policy
    async def record_checkpoint(self, record: CheckpointRecord) -> None:
        """What was trained and the checkpoint that holds it; the same version twice replaces the first."""
        ...

    async def checkpoints(self, run_id: str | None = None) -> list[CheckpointRecord]: ...

    # upkeep
    async def counts(self) -> dict[str, int]:
        """Rollouts by state ("rollouts.running"), calls by reason ("calls.trainable", "calls.undelivered"), ..."""
        ...

    async def prune(self, keep_rollouts: int) -> int:
        """Delete the oldest finished rollouts beyond `keep_rollouts`; returns how many went."""
        ...
