"""How a harness sees the messages dialect: its events, and what the official client makes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anthropic
import httpx2
import orjson
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from agl_runtime.gateway.capture import StreamAssembler, is_terminal, read_answer
from agl_runtime.gateway.dialects import EventStream
from agl_runtime.gateway.internal import Answer

Raw = dict[str, Any]
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def play(stream: EventStream, chunks: Iterable[Raw]) -> tuple[bytes, bytes, Answer]:
    """What the gateway would send before and after it has recorded the call, and the answer that it records."""
    assembler, before, held = StreamAssembler(), b"", []
    for chunk in chunks:
        assembler.feed(chunk)
        if held or is_terminal(chunk):
            held.append(chunk)
        else:
            before += stream.feed(chunk)
    answer = read_answer(assembler.response())
    return before, b"".join(map(stream.feed, held)) + stream.end(answer), answer


def events(data: bytes) -> list[Raw]:
    """The events of a stream, each checked against the official package's types and its own name."""
    found = []
    for block in data.split(b"\n\n")[:-1]:
        name, text = block.removeprefix(b"event: ").split(b"\ndata: ")
        event = orjson.loads(text)
        assert event["type"] == name.decode()
        if event["type"] not in ("ping", "error"):
            EVENTS.validate_python(event)
        found.append(event)
    return found


def order(data: bytes) -> list[str]:
    """The events in short: the type, for blocks with its index and what it is of."""
    short = {"message_start": "start", "message_delta": "delta", "message_stop": "stop", "ping": "ping"}
    out = []
    for event in events(data):
        kind, index = event["type"], event.get("index")
        if kind == "content_block_start":
            out.append(f"{index} {event['content_block']['type']}")
        elif kind == "content_block_delta":
            out.append(f"{index} {event['delta']['type']}")
        else:
            out.append(short.get(kind) or f"{index} stop")
    return out


def read_by_client(data: bytes) -> Message:
    """The message that the official client's helper puts together from a stream."""
    head = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=head, content=data))
    with (
        httpx2.Client(transport=transport) as http,
        anthropic.Anthropic(api_key="k", base_url="http://model", http_client=http, max_retries=0) as client,
        client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]) as stream,
    ):
        return stream.get_final_message()
