"""A model server that costs next to nothing: it answers chat and plain completions with bytes made beforehand.

A streamed answer goes out as a model server's does: step by step, one event of every running stream in a step, each
event in a write of its own.

    python -m support.model_stub TURNS FIRST SAMPLED OBSERVED [DELAY_S]     says its port, ends with standard input
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence

from support.conversation import MARK, TURN, TURN_DIGITS, Shape, answers, chunks

HEAD_END = b"\r\n\r\n"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
STREAM = b'"stream":true'
CHAT = b'"messages":'
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


class Answers:
    """The bytes of every turn's answer, around the places of the mark; `text` for those of plain completions."""

    def __init__(self, shape: Shape, *, text: bool = False) -> None:
        turns = range(shape.turns)
        self.whole = [_response(body).split(MARK) for body in answers(shape, text=text)]
        self.events = [[_framed(event).split(MARK) for event in chunks(shape, turn, text=text)] for turn in turns]


def _response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(event), event)


class Streams:
    """Runs all streams in step."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.running: dict[Connection, int] = {}
        self.is_due = False

    def start(self, connection: Connection) -> None:
        self.running[connection] = 0
        self.schedule()

    def schedule(self) -> None:
        if self.running and not self.is_due:
            self.is_due = True
            self.loop.call_soon(self.step)

    def step(self) -> None:
        self.is_due = False
        for connection, at in list(self.running.items()):
            if connection.is_full:
                continue
            connection.transport.write(connection.mark.join(connection.events[at]))
            if at + 1 == len(connection.events):
                connection.transport.write(b"0\r\n\r\n")
                del self.running[connection]
            else:
                self.running[connection] = at + 1
        if any(not connection.is_full for connection in self.running):
            self.schedule()


class Connection(asyncio.Protocol):
    """One client's; a request is answered when it is whole."""

    transport: asyncio.Transport

    def __init__(self, chat: Answers, text: Answers, streams: Streams, delay_s: float) -> None:
        self.chat = chat
        self.text = text
        self.streams = streams
        self.delay_s = delay_s
        self.received = bytearray()
        self.mark = b""
        self.events: Sequence[list[bytes]] = ()
        self.is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.streams.running.pop(self, None)

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.streams.schedule()

    def data_received(self, data: bytes) -> None:
        self.received += data
        head_end = self.received.find(HEAD_END)
        if head_end < 0:
            return
        length = LENGTH.search(self.received, 0, head_end)
        size = head_end + len(HEAD_END) + (int(length[1]) if length else 0)
        if len(self.received) >= size:
            body = bytes(self.received[head_end:size])
            del self.received[:size]
            self.answer(body)

    def answer(self, body: bytes) -> None:
        at = body.rfind(TURN) + len(TURN)
        self.mark = body[at : at + len(MARK)]
        at += len(MARK) + 1
        turn = int(body[at : at + TURN_DIGITS])
        ready = self.chat if CHAT in body else self.text
        if STREAM in body:
            self.events = ready.events[turn]
            self.transport.write(STREAM_HEAD)
            self.streams.start(self)
        elif self.delay_s:
            answer = self.mark.join(ready.whole[turn])
            asyncio.get_running_loop().call_later(self.delay_s, self.transport.write, answer)
        else:
            self.transport.write(self.mark.join(ready.whole[turn]))


async def serve(shape: Shape, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    chat, text, streams = Answers(shape), Answers(shape, text=True), Streams()
    server = await loop.create_server(lambda: Connection(chat, text, streams, delay_s), "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    numbers = sys.argv[1:]
    asyncio.run(serve(Shape(*map(int, numbers[:4])), float(numbers[4]) if len(numbers) > 4 else 0.0))
