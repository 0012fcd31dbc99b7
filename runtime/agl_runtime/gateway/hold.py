"""Holding calls while the weights change or their model server is away, and counting those at a model server.

New calls wait while the gateway is paused or no model is registered, and admitted ones while their server cannot be
reached; past the limit they get 429 with Retry-After, which harnesses wait out. `inflight` counts admitted calls until
their record is durable: when it reaches zero nothing that was sampled from the old weights is still on its way. A held
call is not in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agl_runtime.gateway.changes import Signal
from agl_runtime.gateway.internal import HELD_CODE, CallRefused
from agl_runtime.schemas import PauseRequest, ProxyState

KEEP_ALIVE_S = 10.0


@dataclass
class Hold:
    """`limit_s` is the longest time that one call is held; `clock` is monotonic, in seconds."""

    limit_s: float
    clock: Callable[[], float] = time.monotonic
    _pause: PauseRequest | None = None
    _has_model: bool = False
    _closing: bool = False
    _registrations: int = 0
    _moved: Signal = field(default_factory=Signal)
    _landed: Signal = field(default_factory=Signal)
    _inflight: int = 0
    _held: int = 0
    _held_since: float = 0.0
    _held_before_s: float = 0.0

    @property
    def is_open(self) -> bool:
        return self._pause is None and self._has_model

    @property
    def held_total_s(self) -> float:
        """Wall time in which at least one call was held."""
        return self._held_before_s + (self.clock() - self._held_since if self._held else 0.0)

    def state(self) -> ProxyState:
        pause = self._pause or PauseRequest()
        counts = {"inflight": self._inflight, "held": self._held}
        return ProxyState(paused=self._pause is not None, **counts, **pause.model_dump())

    def pause(self, request: PauseRequest) -> None:
        self._pause = request
        self._moved.fire()

    def resume(self) -> None:
        self._pause = None
        self._moved.fire()

    def set_has_model(self, has_model: bool) -> None:
        self._has_model = has_model
        self._registrations += 1
        self._moved.fire()

    def close(self) -> None:
        """Refuse what is held and everything that would be: the gateway stops."""
        self._closing = True
        self._moved.fire()
        self._landed.fire()

    async def admit(self, keep_alive: Callable[[], None]) -> None:
        """Return as soon as a call may go on; the caller enters `flight` before it awaits anything. Calls `keep_alive`
        now and then meanwhile. Raises CallRefused past the limit."""
        if self.is_open:
            return
        with self._holding():
            give_up_at = self.clock() + self.limit_s
            while not self.is_open:
                left_s = give_up_at - self.clock()
                if left_s <= 0 or self._closing:
                    raise self._refusal()
                # Past the limit nothing is said: a stream that has not begun can still be refused by its status.
                if not await self._moved.wait(self._moved.count, min(left_s, KEEP_ALIVE_S)) and left_s > KEEP_ALIVE_S:
                    keep_alive()

    @contextmanager
    def flight(self) -> Iterator[None]:
        self._inflight += 1
        try:
            yield
        finally:
            self._land()

    async def outlast(self, since: float, pause_s: float, keep_alive: Callable[[], None]) -> bool:
        """Hold a call in flight whose model server cannot be reached since `since`: for `pause_s` or until models are
        registered, and on while the gateway is not open. False when it was held past the limit since then."""
        registrations, again_at = self._registrations, self.clock() + pause_s
        self._land()
        try:
            with self._holding():
                while not self.is_open or (self._registrations == registrations and self.clock() < again_at):
                    left_s = since + self.limit_s - self.clock()
                    if left_s <= 0 or self._closing:
                        return False
                    wait_s = min(left_s, max(again_at - self.clock(), 0.0) if self.is_open else KEEP_ALIVE_S)
                    if not await self._moved.wait(self._moved.count, wait_s) and self.clock() - since >= KEEP_ALIVE_S:
                        keep_alive()
                return True
        finally:
            self._inflight += 1  # before the caller awaits anything

    def _land(self) -> None:
        self._inflight -= 1
        if not self._inflight:
            self._landed.fire()

    async def drained(self, wait_s: float) -> ProxyState:
        """Wait up to `wait_s` for nothing to be in flight."""
        give_up_at = self.clock() + wait_s
        while self._inflight and not self._closing and (left_s := give_up_at - self.clock()) > 0:
            await self._landed.wait(self._landed.count, left_s)
        return self.state()

    @contextmanager
    def _holding(self) -> Iterator[None]:
        if not self._held:
            self._held_since = self.clock()
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if not self._held:
                self._held_before_s += self.clock() - self._held_since

    def _refusal(self) -> CallRefused:
        missing = "The policy's weights are changing" if self._has_model else "No model server is registered"
        why = "The gateway is stopping" if self._closing else missing
        return CallRefused(
            f"{why}; this call was held for as long as gateway.hold_limit_s allows.",
            "Call again after the time that Retry-After names.",
            http_status=429,
            code=HELD_CODE,
            retry_after_s=self.state().retry_after_seconds,
            infrastructure=True,
        )
