"""POSTs to model servers over HTTP/1.1: connections are kept, one request at a time on each; httptools parses.

Calls and pieces of streams are what the gateway does most, and a general client does more for each than they need.
Redirects, proxies and compression, which model servers have no use for, are not followed.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import quote, urlsplit

import httptools

CONNECT_TIMEOUT_S = 10.0
KEPT_S = 60.0
HEAD_BYTES = 2**20
ANSWER_BYTES = 512 * 2**20  # as JSON: a million tokens with all that is told of each
Address = tuple[str, int, bool]  # host, port, and whether it is reached by TLS


class WireFailed(Exception):
    """No whole answer came. The sentence goes on from "The model server at .."."""


class Unreachable(WireFailed):
    """The request was never taken."""


class Dropped(WireFailed):
    """The connection ended before a byte of the answer."""


class Silent(WireFailed):
    """Nothing came for as long as the server was waited for."""


@functools.lru_cache(maxsize=256)
def _parts(url: str) -> tuple[Address, str]:
    """Where a URL leads, and the first lines of a request to it. Raises Unreachable."""
    try:
        parts = urlsplit(url)
        host, port, is_tls = parts.hostname or "", parts.port, parts.scheme == "https"
        name = host.encode("idna").decode() if not host.isascii() else f"[{host}]" if ":" in host else host
    except ValueError as error:
        raise Unreachable(f"has an address that cannot be read ({error})") from error
    if not host or parts.scheme not in ("http", "https"):
        raise Unreachable("has an address without http:// or https:// and a host")
    target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (f"?{parts.query}" if parts.query else "")
    place = name if port is None else f"{name}:{port}"
    head = f"POST {target} HTTP/1.1\r\nHost: {place}\r\nContent-Type: application/json\r\nAccept-Encoding: identity\r\n"
    return (host, port or (443 if is_tls else 80), is_tls), head


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class Response:
    """An answer from its head on: `status` and `headers`, whose names are in lower case. `on_..` are the parser's."""

    def __init__(self, connection: _Connection, idle_timeout_s: float) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._connection = connection
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        self._head_bytes = 0
        self._has_head = self._is_whole = self._is_reusable = False
        self._failure: WireFailed | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._idle_timeout_s = idle_timeout_s
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(idle_timeout_s, self._check_silence)

    async def head(self) -> None:
        """Wait for it. Raises WireFailed."""
        while not self._has_head:
            await self._more()

    async def read(self) -> bytes:
        """The whole body. Raises WireFailed."""
        while not self._is_whole:
            await self._more()
        whole = b"".join(self._pieces)
        self._pieces.clear()
        return whole

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it comes. Raises WireFailed."""
        while True:
            if self._pieces:
                piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
                self._pieces.clear()
                yield piece
            elif self._is_whole:
                return
            else:
                await self._more()

    def close(self) -> None:
        """Give the connection back, or end it where the answer was not read to its end: the server stops generating."""
        self._timer.cancel()
        if self._connection.response is self:
            self._connection.release(reusable=self._is_reusable)

    def feed(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if not self._has_head:
            self._count_head(len(data))
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(WireFailed(f"does not speak HTTP ({error})"))
        self._wake()

    def lost(self, error: Exception | None) -> None:
        is_framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        if self._has_head and not is_framed and error is None:
            self._is_whole = True
        kind = WireFailed if self._head_bytes else Dropped
        self.fail(kind(f"broke off ({error or 'the connection was closed'})"))

    def fail(self, failure: WireFailed) -> None:
        if not self._is_whole and self._failure is None:
            self._failure = failure
        self._wake()

    def on_message_begin(self) -> None:
        if self._is_whole:
            self._connection.end()  # an answer to nothing

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._has_head:
            self._count_head(len(name) + len(value))  # a trailer
        else:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if not self._is_whole:
            self.status = self._parser.get_status_code()
            self._has_head = self.status >= 200  # before them may come heads that only inform

    def on_body(self, piece: bytes) -> None:
        if not self._is_whole:
            self._pieces.append(piece)
            self._size_bytes += len(piece)
            if self._size_bytes > ANSWER_BYTES:
                self._break_off(f"does not end its answer: it told {self._size_bytes} bytes")

    def on_message_complete(self) -> None:
        self._is_whole = self._has_head and self._failure is None
        self._is_reusable = self._is_whole and self._parser.should_keep_alive()

    def _count_head(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > HEAD_BYTES:
            self._break_off(f"does not end its answer's head: it told {self._head_bytes} bytes")

    def _break_off(self, what: str) -> None:
        self.fail(WireFailed(what))
        self._connection.end()

    async def _more(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_silence(self) -> None:
        left_s = self._heard_at + self._idle_timeout_s - self._loop.time()
        if left_s <= 0:
            self.fail(Silent("fell silent"))
        else:
            self._timer = self._loop.call_later(left_s, self._check_silence)


@dataclass(eq=False)
class _Connection(asyncio.Protocol):
    """`idle` are the kept connections of its address, itself among them while nothing is asked on it."""

    idle: list[_Connection]
    response: Response | None = None
    idle_since: float = 0.0
    transport: asyncio.Transport = field(init=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.response is not None:
            self.response.feed(data)
        else:
            self.end()  # an answer to nothing

    def connection_lost(self, error: Exception | None) -> None:
        if self.response is not None:
            self.response.lost(error)
        self.end()

    def release(self, *, reusable: bool) -> None:
        self.response = None
        if reusable and not self.transport.is_closing():
            self.idle_since = asyncio.get_running_loop().time()
            self.idle.append(self)
            while self.idle and self.idle_since - self.idle[0].idle_since > KEPT_S:
                self.idle[0].end()
        else:
            self.end()

    def end(self) -> None:
        if self in self.idle:
            self.idle.remove(self)
        self.transport.abort()


@dataclass
class Wire:
    """`idle_timeout_s` bounds how long a server may say nothing. Belongs to one event loop."""

    idle_timeout_s: float
    _idle: dict[Address, list[_Connection]] = field(default_factory=dict)

    async def post(self, url: str, body: bytes, key: str | None) -> Response:
        """An answer whose head has come; close it. Raises WireFailed."""
        address, head = _parts(url)
        if key is not None:
            if not key.isprintable():
                raise WireFailed("has a key that no header can hold")
            head += f"Authorization: Bearer {key}\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body
        if kept := self._kept(address):
            with suppress(Dropped):  # the server closed it, as it may, just when it was used again
                return await self._ask(kept, request)
        return await self._ask(await self._connect(address), request)

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in list(connections):
                connection.end()

    async def _ask(self, connection: _Connection, request: tuple[bytes, bytes]) -> Response:
        response = connection.response = Response(connection, self.idle_timeout_s)
        try:
            connection.transport.writelines(request)
            await response.head()
        except BaseException:
            response.close()
            raise
        return response

    def _kept(self, address: Address) -> _Connection | None:
        idle = self._idle.setdefault(address, [])
        while idle:
            connection = idle.pop()
            is_fresh = asyncio.get_running_loop().time() - connection.idle_since < KEPT_S
            if is_fresh and not connection.transport.is_closing():
                return connection
            connection.end()
        return None

    async def _connect(self, address: Address) -> _Connection:
        host, port, is_tls = address
        idle, tls = self._idle.setdefault(address, []), _tls() if is_tls else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                create = asyncio.get_running_loop().create_connection
                return (await create(lambda: _Connection(idle), host, port, ssl=tls))[1]
        except ssl.SSLError as error:
            raise WireFailed(f"gave no TLS connection ({error.reason})") from error
        except (OSError, TimeoutError, UnicodeError) as error:
            raise Unreachable("could not be reached") from error
