"""The attempts whose agents are calling, and their calls: a cache over the store, rebuilt after a restart.

An attempt is closed before it is sealed: calls that still run are abandoned, and the store is told to seal only when
all of them are on record. What comes later is refused.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from agl_runtime.gateway.capture import StreamAssembler, read_partial
from agl_runtime.gateway.changes import Signal
from agl_runtime.gateway.dialects import Dialect, EventStream
from agl_runtime.gateway.exchange import Exchange
from agl_runtime.gateway.internal import Answer, Json, ModelRequest
from agl_runtime.gateway.prepare import Prepared
from agl_runtime.gateway.registry import Registry
from agl_runtime.gateway.upstream import Reply
from agl_runtime.schemas import Mode, Rollout
from agl_runtime.store.base import Store

SETTLE_S = 5.0


@dataclass(eq=False, slots=True)
class Call:
    """`is_long` says that its request takes the store time to write. `may_cancel` is false before its task runs and
    while the record is being written: a call that is abandoned then ends after that. `reply`, `assembler` and `events`
    appear when the model server begins to answer; `held` are the chunks that finish its answer."""

    attempt: Attempt
    mode: Mode
    dialect: Dialect
    request: ModelRequest
    prepared: Prepared
    retry_key: str
    exchange: Exchange = field(default_factory=Exchange)
    call_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_long: bool = False
    is_auxiliary: bool = False
    may_cancel: bool = False
    is_abandoned: bool = False
    started_at: float = 0.0
    reply: Reply | None = None
    assembler: StreamAssembler | None = None
    events: EventStream | None = None
    held: list[Json] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def abandon(self) -> None:
        self.is_abandoned = True
        if self.may_cancel and self.task is not None:
            self.task.cancel()

    def allow_cancel(self) -> None:
        """From here on the call may be cancelled; raises CancelledError when it was abandoned before."""
        self.may_cancel = True
        if self.is_abandoned:
            raise asyncio.CancelledError

    def keep_alive(self) -> None:
        if self.request.stream:
            self.exchange.write(self.dialect.keep_alive)

    def latency_ms(self) -> float:
        return (time.monotonic() - self.started_at) * 1000

    def partial_answer(self) -> Answer:
        """What a stream had said when it broke off."""
        return read_partial(self.assembler.response() if self.assembler else {"choices": []})


@dataclass(eq=False)
class Attempt:
    """`is_resumed` until its first call since the gateway's start, if it had calls before. `answers` maps the ids of
    its answers to their calls, `answered` the tool-call ids in them to the calls that gave them, and `sampled` those
    that only one call gave to their arguments, as far as that was since the gateway's start. `repeats` counts requests
    that were sent again without the mark of a retry: each is a call of its own."""

    rollout: Rollout
    attempt_id: str
    is_closed: bool
    is_resumed: bool = False
    answers: dict[str, str] = field(default_factory=dict)
    answered: dict[str, list[str]] = field(default_factory=dict)
    sampled: dict[str, str] = field(default_factory=dict)
    has_asked_policy: bool = False
    repeats: dict[str, int] = field(default_factory=dict)
    running: set[Call] = field(default_factory=set)
    _busy: int = 0
    _moved: Signal = field(default_factory=Signal)

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

    def run_of(self, retry_key: str) -> Call | None:
        return next((call for call in self.running if call.retry_key == retry_key and not call.is_abandoned), None)

    def remember(self, call_id: str, answer_id: str | None, tool_calls: Mapping[str, str]) -> None:
        if answer_id:
            self.answers[answer_id] = call_id
        for tool_call_id, arguments in tool_calls.items():
            if tool_call_id in self.answered:
                self.sampled.pop(tool_call_id, None)
            elif arguments:
                self.sampled[tool_call_id] = arguments
            self.answered.setdefault(tool_call_id, []).append(call_id)

    async def close(self) -> None:
        """Refuse new calls, abandon what runs, and wait a while until it is on record."""
        self.is_closed = True
        for call in list(self.running):
            call.abandon()
        while self._busy and await self._moved.wait(self._moved.count, SETTLE_S):
            pass


@dataclass
class Attempts:
    store: Store
    registry: Registry
    _open: dict[tuple[str, str], Attempt] = field(default_factory=dict)
    _closing: list[Callable[[tuple[str, str]], bool]] = field(default_factory=list)

    async def get(self, rollout_id: str, attempt_id: str) -> Attempt:
        """Raises NotFoundError. A closed attempt is not kept."""
        if known := self._open.get((rollout_id, attempt_id)):
            return known
        rollout = await self.store.get_rollout(rollout_id)
        state = await self.store.attempt_state(rollout_id, attempt_id)
        attempt = Attempt(rollout, attempt_id, state == "sealed", is_resumed=state == "called")
        if attempt.is_closed:
            return attempt
        for call in await self.store.calls(rollout_id, attempt_id) if state == "called" else ():
            attempt.has_asked_policy |= self.registry.meant(call.info.model) == self.registry.policy
            tool_calls = dict.fromkeys(call.side.get("tool_call_ids", ()), "")
            attempt.remember(call.info.call_id, call.side.get("answer_id"), tool_calls)
        attempt.is_closed = any(is_meant((rollout_id, attempt_id)) for is_meant in self._closing)
        return attempt if attempt.is_closed else self._open.setdefault((rollout_id, attempt_id), attempt)

    @asynccontextmanager
    async def closed(
        self, rollout_id: str, attempt_id: str | None = None, *, but: str | None = None
    ) -> AsyncIterator[None]:
        """Close one attempt of a rollout, or all of them except `but`. Seal them within it: until it ends none of them
        is opened again, by a call that comes late."""

        def is_meant(key: tuple[str, str]) -> bool:
            return key[0] == rollout_id and attempt_id in (None, key[1]) and key[1] != but

        self._closing.append(is_meant)
        try:
            for attempt in [attempt for key, attempt in self._open.items() if is_meant(key)]:
                await attempt.close()
            yield
        finally:
            self._closing.remove(is_meant)
            self._open = {key: attempt for key, attempt in self._open.items() if not is_meant(key)}

    async def close(self, rollout_id: str, *, but: str | None = None) -> None:
        """As `closed`, of what is sealed already."""
        async with self.closed(rollout_id, but=but):
            pass

    def all_running(self) -> list[Call]:
        return [call for attempt in self._open.values() for call in attempt.running]
