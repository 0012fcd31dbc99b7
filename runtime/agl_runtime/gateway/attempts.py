"""What the gateway remembers of the attempts whose agents are calling: a cache over the store, rebuilt after a restart.

An attempt is closed before it is sealed: calls that still run are abandoned, and the store is told to seal only when
all of them are on record. What comes later is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from agl_runtime.gateway.changes import Signal
from agl_runtime.schemas import TERMINAL_STATES, Rollout
from agl_runtime.store.base import Store, StoredCall

SETTLE_S = 5.0


class Running(Protocol):
    """A call that has not ended."""

    @property
    def retry_key(self) -> str: ...
    @property
    def is_abandoned(self) -> bool: ...
    def abandon(self) -> None:
        """Stop it soon, with what it has on record."""
        ...


class Attempt:
    """`answered` maps the tool-call ids of its answers to the calls that gave them. `repeats` counts requests that were
    sent again without the mark of a retry: each is a call of its own."""

    def __init__(self, rollout: Rollout, attempt_id: str, *, is_closed: bool) -> None:
        self.rollout = rollout
        self.attempt_id = attempt_id
        self.is_closed = is_closed
        self.answered: dict[str, list[str]] = {}
        self.has_asked_policy = False
        self.repeats: dict[str, int] = {}
        self.running: set[Running] = set()
        self._busy = 0
        self._moved = Signal()

    @property
    def rollout_id(self) -> str:
        return self.rollout.rollout_id

    @contextmanager
    def work(self) -> Iterator[None]:
        """Something that must end before the attempt is sealed."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            self._moved.fire()

    def retry_key(self, digest: str, *, is_retry: bool) -> str:
        """Under which a request is found again: a marked retry's is that of the newest call with the same bytes."""
        if is_retry:
            return f"{digest}:{self.repeats.setdefault(digest, 1)}"
        self.repeats[digest] = self.repeats.get(digest, 0) + 1
        return f"{digest}:{self.repeats[digest]}"

    def run_of(self, retry_key: str) -> Running | None:
        return next((call for call in self.running if call.retry_key == retry_key and not call.is_abandoned), None)

    def remember(self, call_id: str, tool_call_ids: Iterable[str]) -> None:
        for tool_call_id in tool_call_ids:
            self.answered.setdefault(tool_call_id, []).append(call_id)

    async def close(self) -> None:
        """Refuse new calls, abandon what runs, and wait a while until it is on record."""
        self.is_closed = True
        for call in list(self.running):
            call.abandon()
        while self._busy and await self._moved.wait(self._moved.count, SETTLE_S):
            pass


class Attempts:
    def __init__(self, store: Store, policy: str) -> None:
        self._store = store
        self._policy = policy
        self._open: dict[tuple[str, str], Attempt] = {}

    async def get(self, rollout_id: str, attempt_id: str) -> Attempt:
        """Raises NotFoundError. A closed attempt is not kept."""
        if known := self._open.get((rollout_id, attempt_id)):
            return known
        rollout = await self._store.get_rollout(rollout_id)
        is_over = rollout.status.state in TERMINAL_STATES
        attempt = Attempt(rollout, attempt_id, is_closed=is_over or await self._store.is_sealed(rollout_id, attempt_id))
        if attempt.is_closed:
            return attempt
        for call in await self._store.calls(rollout_id, attempt_id):
            self._recall(attempt, call)
        return self._open.setdefault((rollout_id, attempt_id), attempt)

    async def close(self, rollout_id: str, attempt_id: str | None = None, *, but: str | None = None) -> None:
        """Close one attempt of a rollout, or all of them except `but`."""
        for key, attempt in list(self._open.items()):
            if key[0] == rollout_id and attempt_id in (None, key[1]) and key[1] != but:
                await attempt.close()
                self._open.pop(key, None)

    def all_running(self) -> list[Running]:
        return [call for attempt in self._open.values() for call in attempt.running]

    def _recall(self, attempt: Attempt, call: StoredCall) -> None:
        attempt.has_asked_policy |= call.info.model == self._policy
        attempt.remember(call.info.call_id, call.side.get("tool_call_ids", ()))
