"""A load generator that costs little: bare HTTP/1.1 over kept connections, one call at a time on each.

Every answer must be 200 and whole; the first that is not ends the run. `drive` is bounded by its calls and by time.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
LAST_CHUNK = b"0\r\n\r\n"
EVENT = b"data: {"


@dataclass(frozen=True, slots=True)
class Request:
    """`path` is below the server's root."""

    path: str
    key: str
    body: bytes

    def encode(self, host: str) -> bytes:
        head = f"POST {self.path} HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {self.key}\r\n"
        size = f"content-type: application/json\r\ncontent-length: {len(self.body)}\r\n\r\n"
        return (head + size).encode() + self.body


@dataclass(frozen=True, slots=True)
class Load:
    """What a run of calls gave. `events` counts the events of streamed answers, `[DONE]` left out."""

    latencies_s: list[float]
    wall_s: float
    events: int

    @property
    def calls(self) -> int:
        return len(self.latencies_s)

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.wall_s

    @property
    def events_per_s(self) -> float:
        return self.events / self.wall_s


class Refused(RuntimeError):
    """An answer that was not 200."""


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self) -> None:
        self._received = bytearray()
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Refused(f"The connection was closed: {error}."))

    async def call(self, request: bytes) -> bytes:
        """The whole answer, head and framing included."""
        self._received.clear()
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        head_end = self._received.find(HEAD_END)
        if head_end < 0 or self._answer is None or self._answer.done():
            return
        length = LENGTH.search(self._received, 0, head_end)
        if length is not None:
            is_whole = len(self._received) >= head_end + len(HEAD_END) + int(length[1])
        else:
            is_whole = self._received.endswith(LAST_CHUNK)
        if is_whole:
            self._answer.set_result(bytes(self._received))


async def drive(
    url: str, agents: list[Iterator[Request]], *, at_most_s: float, spread_s: float = 0.0, warm_s: float = 0.0
) -> Load:
    """Each of `agents` on a connection of its own, one call after another, until they end or `at_most_s` is over.
    They begin within `spread_s`, evenly; what ended before `warm_s` is not counted."""
    place = urlsplit(url)
    host, port = place.hostname or "127.0.0.1", place.port or 80
    latencies: list[float] = []
    events = 0
    began = time.perf_counter()
    counted_from, stop_at = began + warm_s, began + at_most_s

    async def agent(number: int, requests: Iterator[Request]) -> None:
        nonlocal events
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port)
        await asyncio.sleep(spread_s * number / len(agents))
        for request in requests:
            data = request.encode(f"{host}:{port}")
            sent = time.perf_counter()
            if sent > stop_at:
                break
            answer = await connection.call(data)
            ended = time.perf_counter()
            if not answer.startswith(b"HTTP/1.1 200"):
                raise Refused(answer[:500].decode(errors="replace"))
            if ended > counted_from:
                latencies.append(ended - sent)
                events += answer.count(EVENT)
        connection.transport.close()

    async with asyncio.TaskGroup() as group:
        for number, requests in enumerate(agents):
            group.create_task(agent(number, requests))
    return Load(latencies, time.perf_counter() - counted_from, events)
