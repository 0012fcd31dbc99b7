"""The blocks of a message of Anthropic's messages API, whole and as a stream of events. Pure.

A harness may act on a tool call as soon as its block stops, and a block must stop before the next one starts. So of the
tool calls the first alone is told as it comes, without its stop; its stop and all that comes after it are told at the
end, which is after the call's commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson
from pydantic_core import from_json

from agl_runtime.gateway import bodies
from agl_runtime.gateway.dialects.messages_errors import error_body
from agl_runtime.gateway.dialects.messages_request import SIGNED
from agl_runtime.gateway.dialects.said import SaidCall, calls_of, reasoning_of, text, text_of
from agl_runtime.gateway.dialects.tools import UNPARSED
from agl_runtime.gateway.internal import Answer, CallRefused, Json, ModelRequest

_NO_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
_REASONS = {"length": "max_tokens", "content_filter": "refusal"}
_CHECKED_SHARE = 32  # arguments are looked at again when this share of them is new: at a cost that grows as they do
# How a block starts, and where its deltas have their text.
_BLANK: dict[str, Json] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
_DELTAS = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
_DELTAS["tool_use"] = ("input_json_delta", "partial_json")


def message_of(request: ModelRequest, answer: Answer) -> Json:
    """The whole message. Its `stop_reason` is None for an answer that broke off."""
    choice = answer.response["choices"][0]
    said = choice.get("message") or {}
    blocks: list[Json] = []
    if reasoning := reasoning_of(said):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": _signature(request)})
    if content := text_of(said):
        blocks.append({"type": "text", "text": content})
    calls = calls_of(said)
    blocks += [_tool_use(call) for call in calls]
    reason, sequence = _stopped(answer.finish_reason, choice.get("stop_reason"), has_calls=bool(calls))
    counts = answer.usage.get("prompt_tokens"), answer.usage.get("completion_tokens")
    sizes = answer.prompt_ids.size, answer.sampled_ids.size
    sent, sampled = (said if type(said) is int else size for said, size in zip(counts, sizes, strict=True))
    usage = {"input_tokens": sent, "output_tokens": sampled, **_NO_CACHE}
    ending = {"stop_reason": reason, "stop_sequence": sequence, "usage": usage}
    return {**_head(request, answer.model), "content": blocks, **ending}


def replayed(message: Json) -> Iterator[Json]:
    """The events of a whole message."""
    yield _start(message, message["usage"]["input_tokens"])
    for index, block in enumerate(message["content"]):
        yield from _block(index, block)
    yield from _ending(message)


def event(data: Json) -> bytes:
    name: str = data["type"]
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


class MessageStream:
    """Writes one answer's events. `_open` is the type of the block that has been started and not stopped."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._events: list[Json] = []
        self._begun = False
        self._index = -1
        self._open = ""
        self._said = {"thinking": 0, "text": 0}  # characters
        self._call = SaidCall("", "", "")  # the first, as far as it came
        self._sent = 0  # characters of its arguments
        self._broken = False

    def feed(self, chunk: Json) -> bytes:
        self._begin(chunk)
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            if choice.get("index") in (None, 0) and isinstance(delta, dict):
                self._say("thinking", reasoning_of(delta))
                self._say("text", text_of(delta))
                for part in calls_of(delta):
                    self._hear(part)
        return self._flush()

    def end(self, answer: Answer) -> bytes:
        message = message_of(self._request, answer)
        self._begin(answer.response)
        told: list[Json] = []
        if self._open == "tool_use":
            self._argue(self._rest())
            calls = [block for block in message["content"] if block["type"] == "tool_use"]
            told = [call for call in calls if call["id"] == self._call.call_id][:1] or calls[:1]
        self._stop()
        for block in message["content"]:
            kind = block["type"]
            if kind == "tool_use":
                is_due = not any(block is call for call in told)
            else:
                block = {**block, kind: block[kind][self._said[kind] :]}
                is_due = bool(block[kind])
            if is_due:
                self._index += 1
                self._events += _block(self._index, block)
        self._events += _ending(message)
        return self._flush()

    def fail(self, refused: CallRefused) -> bytes:
        return event(error_body(refused))

    def _begin(self, chunk: Json) -> None:
        if not self._begun:
            self._begun = True
            ids = chunk.get("prompt_token_ids")
            count = len(ids) if isinstance(ids, list) else 0
            self._events.append(_start(_head(self._request, chunk.get("model")), count))

    def _start(self, block: Json) -> None:
        self._stop()
        self._open = block["type"]
        self._index += 1
        self._events.append(_opened(self._index, block))

    def _say(self, kind: str, said: str) -> None:
        if said and self._open != "tool_use":
            if self._open != kind:
                self._start({"type": kind})
            self._said[kind] += len(said)
            self._events.append(_delta(self._index, kind, said))

    def _hear(self, part: SaidCall) -> None:
        """One piece of a tool call."""
        if self._open != "tool_use" and part.name:
            self._call = part
            self._start(_tool_use(part))
        elif self._open == "tool_use" and part.key is not None and part.key == self._call.key:
            self._call = SaidCall(*self._call[:2], self._call.arguments + part.arguments, part.key)
        else:
            return
        whole = self._call.arguments
        fresh = len(whole) - self._sent
        if fresh and not self._broken and fresh * _CHECKED_SHARE >= self._sent:
            self._broken = not _may_be_object(whole)
            self._argue("" if self._broken else whole[self._sent :])

    def _argue(self, arguments: str) -> None:
        if arguments:
            self._sent += len(arguments)
            self._events.append(_delta(self._index, "tool_use", arguments))

    def _rest(self) -> str:
        """What ends the first call's arguments: something that a harness can read."""
        whole = self._call.arguments
        if not self._sent:
            return _dumped(_input(whole))
        return whole[self._sent :] if _may_be_object(whole) else ""

    def _stop(self) -> None:
        if self._open:
            self._events += _closed(self._index, self._open, _signature(self._request))
        self._open = ""

    def _flush(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(map(event, events))


def _head(request: ModelRequest, model: Any) -> Json:
    named = request.model or text(model)
    return {"id": request.side["message_id"], "type": "message", "role": "assistant", "model": named}


def _start(message: Json, input_tokens: int) -> Json:
    usage = {"input_tokens": input_tokens, "output_tokens": 0, **_NO_CACHE}
    nothing: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    return {"type": "message_start", "message": {**message, **nothing}}


def _block(index: int, block: Json) -> Iterator[Json]:
    kind = block["type"]
    yield _opened(index, block)
    if told := _dumped(block["input"]) if kind == "tool_use" else block[kind]:
        yield _delta(index, kind, told)
    yield from _closed(index, kind, block.get("signature", ""))


def _opened(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": {**block, **_BLANK[block["type"]]}}


def _delta(index: int, kind: str, said: str) -> Json:
    name, key = _DELTAS[kind]
    return {"type": "content_block_delta", "index": index, "delta": {"type": name, key: said}}


def _closed(index: int, kind: str, signature: str) -> Iterator[Json]:
    if kind == "thinking":
        delta = {"type": "signature_delta", "signature": signature}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _ending(message: Json) -> Iterator[Json]:
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
    yield {"type": "message_stop"}


def _signature(request: ModelRequest) -> str:
    """Names the answer that the thinking is of; clients want a text here, and pass it back."""
    return f"{SIGNED}{request.side['message_id']}"


def _tool_use(call: SaidCall) -> Json:
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(call.arguments)}


def _input(arguments: str) -> Json:
    """What a harness gets: the arguments' object, or one that holds what could not be read as such."""
    if not arguments.strip():
        return {}
    try:
        value = bodies.load(arguments.encode())
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {UNPARSED: arguments}


def _dumped(given: Json) -> str:
    return json.dumps(given, ensure_ascii=False) if given else ""


def _may_be_object(arguments: str) -> bool:
    """Whether they are a JSON object or the beginning of one, as the readers of official clients see it."""
    try:
        return isinstance(from_json(arguments, allow_inf_nan=False, allow_partial=True), dict)
    except ValueError:
        return False


def _stopped(finish: str | None, matched: Any, *, has_calls: bool) -> tuple[str | None, str | None]:
    """The reason and the stop sequence. `matched` is vLLM's: a stop string, or a token's id."""
    if finish is None or finish in _REASONS:
        return _REASONS.get(finish or ""), None
    if has_calls:
        return "tool_use", None
    return ("stop_sequence", matched) if isinstance(matched, str) else ("end_turn", None)
