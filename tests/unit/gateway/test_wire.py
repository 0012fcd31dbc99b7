"""The client of the model servers against a server that writes what a test says, byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from agl_runtime.gateway.wire import Silent, Unreachable, Wire, WireFailed

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n"


@dataclass
class Peer:
    """Answers every request with the next of `answers`, piece by piece; an answer that ends with None is followed by
    the end of the connection. `requests` holds what each connection was asked."""

    answers: list[list[bytes | None]] = field(default_factory=list)
    requests: list[list[bytes]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine: list[bytes] = []
        self.requests.append(mine)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                mine.append(head + await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    made = Peer()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/chat"
    yield made
    server.close()


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    made = Wire(idle_timeout_s=30.0)
    yield made
    made.close()


async def ask(wire: Wire, url: str, body: bytes = b"{}", key: str | None = None) -> bytes:
    response = await wire.post(url, body, key)
    try:
        return b"".join([piece async for piece in response.pieces()])
    finally:
        response.close()


def bytewise(data: bytes) -> list[bytes | None]:
    return [data[i : i + 1] for i in range(len(data))]


@pytest.mark.parametrize("cut", [lambda data: [data], bytewise], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("answer", [WHOLE, CHUNKED, b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + WHOLE])
async def test_calls_one_after_the_other_share_a_connection(
    wire: Wire, peer: Peer, answer: bytes, cut: Callable[[bytes], list[bytes | None]]
) -> None:
    peer.answers = [cut(answer), cut(answer)]
    assert [await ask(wire, peer.url), await ask(wire, peer.url)] == [b"hi", b"hi"]
    assert [len(asked) for asked in peer.requests] == [2]


async def test_the_request_is_what_was_asked(wire: Wire, peer: Peer) -> None:
    peer.answers = [[WHOLE]]
    await ask(wire, peer.url + "/a b?c=d", b'{"a":1}', "secret")
    host = peer.url.split("/")[2]
    assert peer.requests[0][0].decode().split("\r\n") == [
        "POST /v1/chat/a%20b?c=d HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        "Accept-Encoding: identity",
        "Authorization: Bearer secret",
        "Content-Length: 7",
        "",
        '{"a":1}',
    ]


async def test_status_and_headers_are_told(wire: Wire, peer: Peer) -> None:
    peer.answers = [[b"HTTP/1.1 429 Slow\r\nRETRY-After: 3\r\nContent-Length: 0\r\n\r\n"]]
    response = await wire.post(peer.url, b"", None)
    assert (response.status, response.headers["retry-after"]) == (429, "3")
    response.close()


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"],
        [b"HTTP/1.0 200 OK\r\n\r\nhi", None],
        [WHOLE + WHOLE],
    ],
    ids=["closing", "without a length", "with a second answer that nobody asked for"],
)
async def test_a_connection_that_is_not_kept_is_not_used_again(
    wire: Wire, peer: Peer, answer: list[bytes | None]
) -> None:
    peer.answers = [answer, [WHOLE]]
    assert [await ask(wire, peer.url), await ask(wire, peer.url)] == [b"hi", b"hi"]
    assert [len(asked) for asked in peer.requests] == [1, 1]


async def test_a_connection_that_the_server_ended_meanwhile_is_not_used_again(wire: Wire, peer: Peer) -> None:
    peer.answers = [[WHOLE, None], [WHOLE]]
    assert await ask(wire, peer.url) == b"hi"
    async with asyncio.timeout(30):
        while any(wire._idle.values()):
            await asyncio.sleep(0)
    assert await ask(wire, peer.url) == b"hi"


async def test_an_answer_that_is_not_read_to_its_end_ends_the_connection(wire: Wire, peer: Peer) -> None:
    peer.answers = [[b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi"]]
    response = await wire.post(peer.url, b"{}", None)
    response.close()
    await asyncio.wait_for(peer.left.wait(), 30)


async def test_a_caller_cancelled_while_it_waits_ends_the_connection(wire: Wire, peer: Peer) -> None:
    peer.answers = [[]]
    asking = asyncio.create_task(wire.post(peer.url, b"{}", None))
    while not (peer.requests and peer.requests[0]):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    await asyncio.wait_for(peer.left.wait(), 30)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ([None], "broke off (the connection was closed)"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", None], "broke off (the connection was closed)"),
        ([CHUNKED[:-9], None], "broke off (the connection was closed)"),
        ([b"SSH-2.0-OpenSSH\r\n"], "does not speak HTTP"),
    ],
)
async def test_no_whole_answer_is_a_failure_with_its_reason(
    wire: Wire, peer: Peer, answer: list[bytes | None], what: str
) -> None:
    peer.answers = [answer]
    with pytest.raises(WireFailed) as failed:
        await ask(wire, peer.url)
    assert str(failed.value).startswith(what)
    assert not isinstance(failed.value, Silent | Unreachable)


async def test_a_kept_connection_that_is_closed_as_it_is_used_costs_nothing(wire: Wire, peer: Peer) -> None:
    peer.answers = [[WHOLE], [None], [WHOLE]]
    assert [await ask(wire, peer.url), await ask(wire, peer.url)] == [b"hi", b"hi"]
    assert [len(asked) for asked in peer.requests] == [2, 1]


@pytest.mark.parametrize(
    "endless",
    [b"X: y\r\n", b"y" * 64, b"HTTP/1.1 100 Continue\r\n\r\n"],
    ids=["headers", "a value", "heads that only inform"],
)
async def test_a_head_without_end_is_broken_off(wire: Wire, peer: Peer, endless: bytes) -> None:
    start = b"" if endless.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\nX: "
    peer.answers = [[start, *[endless * 1000] * 200]]
    with pytest.raises(WireFailed, match=r"^does not end its answer's head: it told \d+ bytes$"):
        await ask(wire, peer.url)
    await asyncio.wait_for(peer.left.wait(), 30)


async def test_connections_that_were_long_idle_are_closed_when_another_is_given_back(
    wire: Wire, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_runtime.gateway.wire.KEPT_S", -1.0)
    peer.answers = [[WHOLE], [WHOLE]]
    await asyncio.gather(ask(wire, peer.url), ask(wire, peer.url))
    assert not any(wire._idle.values())


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi"])
async def test_a_server_that_says_nothing_is_not_waited_for_for_ever(peer: Peer, beginning: bytes) -> None:
    peer.answers = [[beginning]]
    with pytest.raises(Silent, match="fell silent"):
        await ask(Wire(idle_timeout_s=0.05), peer.url)
    await asyncio.wait_for(peer.left.wait(), 30)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://127.0.0.1:1/v1", "could not be reached"),
        ("http://a..b/v1", "could not be reached"),
        (f"http://{'n' * 60}:8000/v1", "could not be reached"),
        ("http://no-such-host.invalid/v1", "could not be reached"),
        ("127.0.0.1:80/v1", "has an address without http:// or https:// and a host"),
        ("http://[::1/v1", "has an address that cannot be read (Invalid IPv6 URL)"),
        ("http://127.0.0.1:99999/v1", "has an address that cannot be read (Port out of range 0-65535)"),
    ],
)
async def test_a_server_that_was_never_reached_is_away(wire: Wire, url: str, what: str) -> None:
    with pytest.raises(Unreachable) as failed:
        await wire.post(url, b"{}", None)
    assert str(failed.value) == what


async def test_a_key_that_would_break_the_head_is_refused_and_not_told(wire: Wire, peer: Peer) -> None:
    with pytest.raises(WireFailed, match=r"^has a key that no header can hold$"):
        await wire.post(peer.url, b"{}", "secret\r\nX-Other: 1")
