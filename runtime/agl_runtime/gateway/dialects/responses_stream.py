"""The events of a streamed answer of the Responses API, in its order and with its running numbers. Pure.

Texts and the arguments of calls are told as they come. What completes a call, and what ends the answer, is told in
`end` alone, since harnesses act on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from agl_runtime.gateway.dialects.responses_answer import CALLS, TEXTS, call_item, text_item
from agl_runtime.gateway.dialects.said import SaidCall, calls_of, reasoning_of, text_of
from agl_runtime.gateway.dialects.tools import FreeformInput
from agl_runtime.gateway.internal import HELD_CODE, Answer, CallRefused, Json, ModelRequest

_CODES = {429: "rate_limit_exceeded", **dict.fromkeys((400, 413, 422), "invalid_prompt")}
# What text events hold beside the text.
_BESIDE: dict[str, Json] = {"message": {"logprobs": []}, "reasoning": {}}


@dataclass
class _Text:
    """The text item that is being told, `number`th of its kind; `at` is what its events say of its place."""

    kind: str
    number: int
    at: Json
    pieces: list[str] = field(default_factory=list)


@dataclass
class _Call:
    """A tool call as far as it came, the `number`th. Once it is announced, `at` is what its events say of its place,
    and `told` how many characters of its input went out."""

    number: int
    said: SaidCall = field(default=SaidCall("", "", ""))
    at: Json = field(default_factory=dict)
    kind: str = ""
    told: int = 0
    freeform: FreeformInput | None = None


class ResponsesStream:
    """`head` is the response before anything was said, `render` makes the whole one."""

    def __init__(self, request: ModelRequest, head: Json, render: Callable[[ModelRequest, Answer], Json]) -> None:
        self._request = request
        self._head = head
        self._render = render
        self._number = 0
        self._places = 0
        self._texts: dict[str, int] = {}
        self._open: _Text | None = None
        self._calls: dict[int, _Call] = {}

    def feed(self, chunk: Json) -> bytes:
        out = b"" if self._number else self._begin()
        for choice in chunk["choices"]:
            delta = choice.get("delta")
            if choice.get("index") in (0, None) and isinstance(delta, dict):
                out += self._say(delta)
        return out

    def end(self, answer: Answer) -> bytes:
        return self.finish(self._render(self._request, answer))

    def finish(self, response: Json) -> bytes:
        """The end of the stream whose whole answer is `response`: what was not told yet, and what completes it."""
        out = self._begin() + self._close(response["status"])
        live = list(self._calls.values())
        for item in response["output"]:
            if item["type"] in CALLS:
                out += self._end_call(item, live.pop(0) if live else _Call(0))
            elif item["type"] not in self._texts:
                out += self._whole_text(item)
        return out + self._event(f"response.{response['status']}", response=response)

    def fail(self, refused: CallRefused) -> bytes:
        own = refused.code if refused.code != HELD_CODE else None
        code = own or _CODES.get(refused.http_status, "server_error")
        # Codex reads from these words how long to wait.
        told = f"{refused} Try again in {refused.retry_after_s}s." if refused.retry_after_s else str(refused)
        failed = {**self._head, "status": "failed", "error": {"code": code, "message": told}}
        return self._begin() + self._event("response.failed", response=failed)

    def _begin(self) -> bytes:
        kinds = () if self._number else ("created", "in_progress")
        return b"".join(self._event(f"response.{kind}", response=self._head) for kind in kinds)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _added(self, item: Json) -> tuple[Json, bytes]:
        """What the item's further events say of its place, and the event that announces it."""
        at = {"item_id": item["id"], "output_index": self._places}
        self._places += 1
        return at, self._event("response.output_item.added", output_index=at["output_index"], item=item)

    def _done(self, at: Json, item: Json) -> bytes:
        return self._event("response.output_item.done", output_index=at["output_index"], item=item)

    def _say(self, delta: Json) -> bytes:
        out = b""
        if piece := reasoning_of(delta):
            out += self._say_text("reasoning", piece)
        if piece := text_of(delta):
            out += self._say_text("message", piece)
        for part in calls_of(delta):
            out += self._say_call(part)
        return out

    def _say_text(self, kind: str, piece: str) -> bytes:
        out, now = b"", self._open
        if now is None or now.kind != kind:
            out = self._close("completed")
            now, begun = self._begin_text(kind)
            out += begun
        now.pieces.append(piece)
        return out + self._event(f"response.{TEXTS[kind]}.delta", **now.at, delta=piece, **_BESIDE[kind])

    def _begin_text(self, kind: str) -> tuple[_Text, bytes]:
        number = self._texts[kind] = self._texts.get(kind, 0) + 1
        item = text_item(self._head["id"], kind, "", "in_progress", number)
        part = item["content"][0]
        at, added = self._added({**item, "content": [], **({"encrypted_content": None} if kind == "reasoning" else {})})
        self._open = _Text(kind, number, {**at, "content_index": 0})
        return self._open, added + self._event("response.content_part.added", **self._open.at, part=part)

    def _close(self, status: str) -> bytes:
        now, self._open = self._open, None
        if now is None:
            return b""
        said = "".join(now.pieces)
        item = text_item(self._head["id"], now.kind, said, status, now.number)
        out = self._event(f"response.{TEXTS[now.kind]}.done", **now.at, text=said, **_BESIDE[now.kind])
        out += self._event("response.content_part.done", **now.at, part=item["content"][0])
        return out + self._done(now.at, item)

    def _whole_text(self, item: Json) -> bytes:
        said = item["content"][0]["text"]
        out = self._say_text(item["type"], said) if said else self._begin_text(item["type"])[1]
        return out + self._close(item["status"])

    def _say_call(self, part: SaidCall) -> bytes:
        """Announced once its name is known; where that never comes, `finish` tells all of it."""
        key = -1 - len(self._calls) if part.key is None else part.key
        call = self._calls.setdefault(key, _Call(len(self._calls)))
        out, piece = b"", part.arguments
        if not call.at:
            call.said = said = call.said.joined(part)
            if not said.name:
                return b""
            item, piece = call_item(self._request.side, call.number, said), said.arguments
            call.freeform = FreeformInput() if item["type"] == "custom_tool_call" else None
            out = self._close("completed") + self._announce(call, item)
        return out + self._call_delta(call, call.freeform.feed(piece) if call.freeform else piece)

    def _announce(self, call: _Call, item: Json) -> bytes:
        call.kind, is_function = item["type"], item["type"] == "function_call"
        blank = {**item, "arguments": "", "status": "in_progress"} if is_function else {**item, "input": ""}
        call.at, added = self._added(blank)
        return added

    def _call_delta(self, call: _Call, piece: str) -> bytes:
        call.told += len(piece)
        return self._event(f"response.{CALLS[call.kind][1]}.delta", **call.at, delta=piece) if piece else b""

    def _end_call(self, item: Json, call: _Call) -> bytes:
        key, event = CALLS[item["type"]]
        out = b"" if call.at else self._announce(call, item)
        out += self._call_delta(call, item[key][call.told :])
        named = {"name": item["name"]} if key == "arguments" else {}
        return (
            out
            + self._event(f"response.{event}.done", **call.at, **named, **{key: item[key]})
            + self._done(call.at, item)
        )
