"""What a model server said, read from a whole message or from a chunk's delta. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from agl_runtime.gateway.internal import Json


def text(value: Any) -> str:
    """Nothing where it is not text."""
    return value if isinstance(value, str) else ""


def text_of(message: Json) -> str:
    return text(message.get("content"))


def reasoning_of(message: Json) -> str:
    """What model servers call `reasoning_content`, or newer ones `reasoning`."""
    return text(message.get("reasoning_content") or message.get("reasoning"))


class SaidCall(NamedTuple):
    """A tool call as the model server tells it, or a part of one; what is missing is empty. Parts with one `key` are of
    one call, and one that has None is a call of its own."""

    call_id: str
    name: str
    arguments: str
    key: int | None = 0

    def joined(self, part: SaidCall) -> SaidCall:
        return SaidCall(self.call_id or part.call_id, self.name or part.name, self.arguments + part.arguments)


def calls_of(message: Json) -> list[SaidCall]:
    """The tool calls of a message, or their parts in a chunk's delta."""
    given = message.get("tool_calls")
    return [_said(call) for call in given if isinstance(call, dict)] if isinstance(given, list) else []


def _said(call: Json) -> SaidCall:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    index = call.get("index")
    key = index if isinstance(index, int | None) else 0
    return SaidCall(text(call.get("id")), text(function.get("name")), text(function.get("arguments")), key)
