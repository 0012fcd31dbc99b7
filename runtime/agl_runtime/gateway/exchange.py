"""The answer to one model call on its way out.

An `Exchange` is written by the call and read by whoever asks for it: the harness, and the same harness again when it
lost its connection and marked its next request as a retry. It keeps what was written until the call is settled, so that
a late reader gets all of it. `ExchangeResponse` is one reader's HTTP response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agl_runtime.gateway.changes import Signal
from agl_runtime.gateway.internal import Json

EVENT_STREAM = "text/event-stream"


@dataclass(eq=False)
class Exchange:
    """`call_id` is set once the call is on record."""

    call_id: str | None = None
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    ended: bool = False
    readers: int = 0
    moved: Signal = field(default_factory=Signal)

    def start(self, status: int, media_type: str, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.headers = {"content-type": media_type, **(headers or {})}

    def write(self, data: bytes) -> None:
        """One part of an event stream, whose head is sent with its first part."""
        if not data:
            return
        if self.status is None:
            self.start(200, EVENT_STREAM, {"cache-control": "no-cache"})
        self.parts.append(data)
        self.moved.fire()

    def end(self) -> None:
        self.ended = True
        self.moved.fire()

    def whole(self, status: int, body: Json, headers: Mapping[str, str] | None = None) -> None:
        """The whole answer as one JSON object."""
        data = orjson.dumps(body)
        self.start(status, "application/json", {"content-length": str(len(data)), **(headers or {})})
        self.parts.append(data)
        self.end()


@dataclass(slots=True)
class Reading:
    """How it went: `delivered` when the last byte was handed over while the reader was there."""

    delivered: bool = False


class ExchangeResponse(Response):
    """Sends an exchange to one reader, within `reading`."""

    def __init__(self, exchange: Exchange, reading: AbstractAsyncContextManager[Reading]) -> None:
        self._exchange = exchange
        self._reading = reading
        self._is_gone = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._watch(receive))
        try:
            async with self._reading as reading:
                reading.delivered = await self._send(send)
        finally:
            watching.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self._exchange.moved.fire()

    async def _send(self, send: Send) -> bool:
        exchange, sent, has_head = self._exchange, 0, False
        while not self._is_gone:
            seen = exchange.moved.count
            if exchange.status is not None and not has_head:
                raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in exchange.headers.items()]
                await send({"type": "http.response.start", "status": exchange.status, "headers": raw})
                has_head = True
                continue
            if sent < len(exchange.parts) or exchange.ended:
                data, sent = b"".join(exchange.parts[sent:]), len(exchange.parts)
                is_last = exchange.ended
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
                if is_last:
                    return not self._is_gone
                continue
            await exchange.moved.wait(seen)
        return False
