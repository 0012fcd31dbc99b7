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
from agl_runtime.gateway.dialects.tools import UNPARSED
from agl_runtime.gateway.internal import Answer, CallRefused, Json, ModelRequest

NO_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
_REASONS = {"length": "max_tokens", "content_filter": "refusal"}
_CHECKED_SHARE = 32  # arguments are looked at again when this share of them is new: at a cost that grows as they do


def message_of(request: ModelRequest, answer: Answer) -> Json:
    """The whole message. Its `stop_reason` is None for an answer that broke off."""
    choice = answer.response["choices"][0]
    content = blocks_of(request, choice.get("message") or {})
    reason, sequence = _stopped(request, answer, choice, any(block["type"] == "tool_use" for block in content))
    usage = {"input_tokens": _count(answer, "prompt"), "output_tokens": _count(answer, "completion"), **NO_CACHE}
    ending = {"stop_reason": reason, "stop_sequence": sequence, "usage": usage}
    return {**_head(request, answer.model), "content": content, **ending}


def blocks_of(request: ModelRequest, message: Json) -> list[Json]:
    blocks: list[Json] = []
    if reasoning := reasoning_of(message):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": _signature(request)})
    if text := _text(message.get("content")):
        blocks.append({"type": "text", "text": text})
    return blocks + [_tool_use(call) for call in _calls(message)]


def reasoning_of(message: Json) -> str:
    """Of a message or a delta, under either of the names that model servers give it."""
    return _text(message.get("reasoning_content")) or _text(message.get("reasoning"))


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
        self._open: str | None = None
        self._said = {"thinking": 0, "text": 0}
        self._call: Any = None  # the `index` of the first tool call
        self._arguments = ""
        self._sent = 0  # characters of the arguments
        self._broken = False

    def feed(self, chunk: Json) -> bytes:
        self._begin(chunk)
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            if choice.get("index") not in (None, 0) or not isinstance(delta, dict):
                continue
            self._say("thinking", reasoning_of(delta))
            self._say("text", _text(delta.get("content")))
            for call in _calls(delta):
                self._hear(call)
        return self._flush()

    def end(self, answer: Answer) -> bytes:
        message = message_of(self._request, answer)
        self._begin(answer.response)
        began_call = self._open == "tool_use"
        if began_call:
            self._argue(self._rest())
        self._stop()
        for block in message["content"]:
            if block["type"] == "tool_use":
                if not began_call:
                    self._whole(block)
                began_call = False
            elif unsaid := block[block["type"]][self._said[block["type"]] :]:
                self._whole({**block, block["type"]: unsaid})
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

    def _say(self, kind: str, text: str) -> None:
        if not text or self._open == "tool_use":
            return
        if self._open != kind:
            self._stop()
            self._open = kind
            self._index += 1
            self._events.append(_opened(self._index, {"type": kind, kind: "", **_empty_signature(kind)}))
        self._said[kind] += len(text)
        self._events.append(_delta(self._index, f"{kind}_delta", kind, text))

    def _hear(self, call: Json) -> None:
        """One piece of a tool call."""
        function = _function(call)
        if self._open != "tool_use":
            if not _text(function.get("name")):
                return
            self._stop()
            self._open, self._call = "tool_use", call.get("index")
            self._index += 1
            self._events.append(_opened(self._index, {**_tool_use(call), "input": {}}))
        elif call.get("index") != self._call or self._call is None:
            return
        self._arguments += _text(function.get("arguments"))
        fresh = len(self._arguments) - self._sent
        if fresh and not self._broken and fresh * _CHECKED_SHARE >= self._sent:
            self._broken = not _may_be_object(self._arguments)
            self._argue("" if self._broken else self._arguments[self._sent :])

    def _argue(self, text: str) -> None:
        if text:
            self._sent += len(text)
            self._events.append(_delta(self._index, "input_json_delta", "partial_json", text))

    def _rest(self) -> str:
        """What ends the first call's arguments: something that a harness can read."""
        if not self._sent:
            given = _input(self._arguments)
            return _dumped(given) if given else ""
        return self._arguments[self._sent :] if _may_be_object(self._arguments) else ""

    def _stop(self) -> None:
        if self._open == "thinking":
            self._events.append(_delta(self._index, "signature_delta", "signature", _signature(self._request)))
        if self._open is not None:
            self._events.append({"type": "content_block_stop", "index": self._index})
        self._open = None

    def _whole(self, block: Json) -> None:
        self._index += 1
        self._events += _block(self._index, block)

    def _flush(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(map(event, events))


def _head(request: ModelRequest, model: Any) -> Json:
    named = request.model or _text(model)
    return {"id": request.side["message_id"], "type": "message", "role": "assistant", "model": named}


def _start(message: Json, input_tokens: int) -> Json:
    usage = {"input_tokens": input_tokens, "output_tokens": 0, **NO_CACHE}
    nothing: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    return {"type": "message_start", "message": {**message, **nothing}}


def _opened(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, kind: str, key: str, text: str) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, key: text}}


def _block(index: int, block: Json) -> Iterator[Json]:
    kind = block["type"]
    if kind == "tool_use":
        yield _opened(index, {**block, "input": {}})
        if block["input"]:
            yield _delta(index, "input_json_delta", "partial_json", _dumped(block["input"]))
    else:
        yield _opened(index, {**block, kind: "", **_empty_signature(kind)})
        yield _delta(index, f"{kind}_delta", kind, block[kind])
    if kind == "thinking":
        yield _delta(index, "signature_delta", "signature", block["signature"])
    yield {"type": "content_block_stop", "index": index}


def _ending(message: Json) -> Iterator[Json]:
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
    yield {"type": "message_stop"}


def _empty_signature(kind: str) -> Json:
    return {"signature": ""} if kind == "thinking" else {}


def _signature(request: ModelRequest) -> str:
    """Names the answer that the thinking is of; clients want a text here, and pass it back."""
    return f"agl.{request.side['message_id']}"


def _calls(message: Json) -> list[Json]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _tool_use(call: Json) -> Json:
    function = _function(call)
    named = {"id": _text(call.get("id")), "name": _text(function.get("name"))}
    return {"type": "tool_use", **named, "input": _input(_text(function.get("arguments")))}


def _function(call: Json) -> Json:
    function = call.get("function")
    return function if isinstance(function, dict) else {}


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
    return json.dumps(given, ensure_ascii=False)


def _may_be_object(text: str) -> bool:
    """Whether the text is a JSON object or the beginning of one, as the readers of official clients see it."""
    try:
        return isinstance(from_json(text, allow_inf_nan=False, allow_partial=True), dict)
    except ValueError:
        return False


def _stopped(request: ModelRequest, answer: Answer, choice: Json, has_calls: bool) -> tuple[str | None, str | None]:
    finish, matched = answer.finish_reason, choice.get("stop_reason")
    if finish in (None, *_REASONS):
        return (_REASONS[finish] if finish else None), None
    if has_calls:
        return "tool_use", None
    return ("stop_sequence", matched) if isinstance(matched, str) else ("end_turn", None)


def _count(answer: Answer, kind: str) -> int:
    said = answer.usage.get(f"{kind}_tokens")
    return said if type(said) is int else (answer.prompt_ids if kind == "prompt" else answer.sampled_ids).size


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
