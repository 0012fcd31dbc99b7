"""Tool calls in sampled text, in the form `<tool_call>{"name": .., "arguments": {..}}</tool_call>` (Hermes, Qwen).

Arguments are handed on byte for byte as they were sampled, so that a chat template which takes them as a string renders
the same ids again. A newline right before `<tool_call>` and blanks between calls belong to the template and are not
content. What does not parse is content, unchanged; nothing is resampled and nothing repaired.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass

from agl_runtime.trainer.backends.embedded.text import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BLANKS = re.compile(r"[ \t\r\n]*")
_CALL = re.compile(f"\n?{OPEN}(?P<body>.*?){CLOSE}", re.DOTALL)
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The call at place `index` of its answer. `call_id` is unique; `arguments` is the JSON text of an object."""

    index: int
    call_id: str
    name: str
    arguments: str


Piece = str | ToolCall


class ToolReader:
    """Splits a growing text into content and calls. Text that may turn out to be a call is held back until known."""

    def __init__(self) -> None:
        self._held = ""
        self._after_call = False
        self._calls = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while found := _CALL.search(self._held):
            self._release(found.start(), pieces)
            parsed = parse_call(found["body"])
            pieces.append(ToolCall(self._calls, f"call_{secrets.token_hex(12)}", *parsed) if parsed else found[0])
            self._after_call = parsed is not None
            self._calls += self._after_call
            self._held = self._held[len(found[0]) :]
        self._release(self._settled(), pieces)
        return pieces

    def finish(self) -> list[Piece]:
        """The text is at its end: what was held is content after all."""
        pieces: list[Piece] = []
        self._release(len(self._held), pieces)
        return pieces

    def _release(self, size: int, pieces: list[Piece]) -> None:
        """Give the first `size` held characters as content, unless they are blanks that follow a call."""
        content, self._held = self._held[:size], self._held[size:]
        if content and not (self._after_call and not content.strip()):
            pieces.append(content)
            self._after_call = False

    def _settled(self) -> int:
        """How many of the held characters are content whatever follows."""
        opened = self._held.find(OPEN)
        end = opened if opened >= 0 else len(self._held) - overlap(self._held, OPEN)
        if self._after_call and not self._held[:end].strip():
            return 0
        return end - self._held.endswith("\n", 0, end)


def parse_call(text: str) -> tuple[str, str] | None:
    """(name, arguments as written) of a call's JSON text, or None when it is not one."""
    try:
        fields = _fields(text)
        name = json.loads(fields["name"])
    except (ValueError, KeyError, RecursionError):
        return None
    arguments = fields.get("arguments", "")
    return (name, arguments) if isinstance(name, str) and name and arguments.startswith("{") else None


def _fields(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as its own text. Raises ValueError."""
    fields: dict[str, str] = {}
    at = _past(text, 0, "{")
    while True:
        key, at = _DECODER.raw_decode(text, at)
        start = _past(text, at, ":")
        _, end = _DECODER.raw_decode(text, start)
        fields[key] = text[start:end]
        at = _skip(text, end)
        if text.startswith("}", at):
            if text[at + 1 :].strip():
                raise ValueError("text after the object")
            return fields
        at = _past(text, at, ",")


def _skip(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    return blanks.end() if blanks else at


def _past(text: str, at: int, mark: str) -> int:
    at = _skip(text, at)
    if not text.startswith(mark, at):
        raise ValueError(f"no {mark!r} at {at}")
    return _skip(text, at + len(mark))
