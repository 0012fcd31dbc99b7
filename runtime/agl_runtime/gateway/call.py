"""One model call while it runs, and what of it goes on record."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field

from agl_runtime.errors import UpstreamError
from agl_runtime.gateway.attempts import Attempt
from agl_runtime.gateway.capture import StreamAssembler, read_answer
from agl_runtime.gateway.dialects import Dialect, EventStream
from agl_runtime.gateway.exchange import Exchange
from agl_runtime.gateway.internal import Answer, Json, ModelRequest
from agl_runtime.gateway.prepare import Prepared
from agl_runtime.gateway.upstream import Reply
from agl_runtime.schemas import Mode


@dataclass(eq=False, slots=True)
class Call:
    """`may_cancel` is false while the record is being written: an abandoned call ends after that. `reply`,
    `assembler` and `events` appear when the model server begins to answer; `held` are the chunks that finish it."""

    attempt: Attempt
    mode: Mode
    dialect: Dialect
    request: ModelRequest
    prepared: Prepared
    retry_key: str
    exchange: Exchange = field(default_factory=Exchange)
    call_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_auxiliary: bool = False
    may_cancel: bool = True
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

    def partial_answer(self) -> Answer | None:
        """What a stream had said when it broke off."""
        if self.assembler is None:
            return None
        try:
            return read_answer(self.assembler.response())
        except UpstreamError:
            return None  # it broke off before its first choice
