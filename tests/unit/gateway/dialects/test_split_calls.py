"""A tool call is told and recorded whole in every dialect, wherever a stream cuts its arguments."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import orjson
import pytest

from agl_runtime.gateway.dialects import Dialect, all_dialects
from fakes.messages import play

DIALECTS = {dialect.name: dialect for dialect in all_dialects().values()}
ARGUMENTS = '{"a": "é\\n\\"}{", "b": false, "c": {}}'
TOLD = {
    "response.function_call_arguments.delta": lambda event: event["delta"],
    "content_block_delta": lambda event: event["delta"]["partial_json"],
}


def asked(dialect: Dialect) -> Any:
    key = "input" if dialect.name == "responses" else "messages"
    return dialect.parse({"model": "m", "max_tokens": 9, key: [{"role": "user", "content": "x"}]})


def chunks(*pieces: str) -> list[dict[str, Any]]:
    head = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    calls = [head, *({"index": 0, "function": {"arguments": piece}} for piece in pieces)]
    deltas = [{"role": "assistant"}, *({"tool_calls": [call]} for call in calls), {}]
    last = len(deltas) - 1
    return [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": "tool_calls" if number == last else None}]}
        for number, delta in enumerate(deltas)
    ]


def told(data: bytes) -> str:
    """The arguments as the harness puts them together."""
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    whole = ""
    for event in map(orjson.loads, lines):
        if event.get("type") in TOLD:
            whole += TOLD[event["type"]](event)
        for choice in event.get("choices", ()):
            whole += "".join(call["function"]["arguments"] for call in choice["delta"].get("tool_calls", ()))
    return whole


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_arguments_may_be_cut_anywhere(name: str) -> None:
    dialect = DIALECTS[name]
    for first, second in combinations_with_replacement(range(len(ARGUMENTS) + 1), 2):
        pieces = ARGUMENTS[:first], ARGUMENTS[first:second], ARGUMENTS[second:]
        before, after, answer = play(dialect.stream(asked(dialect)), chunks(*pieces))
        assert told(before + after) == ARGUMENTS, pieces
        assert answer.tool_calls == {"c1": ARGUMENTS}
