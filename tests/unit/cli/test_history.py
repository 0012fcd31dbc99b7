from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agl_cli.history import REWRITTEN, is_rewritten, judged
from agl_runtime.samples.types import Break
from fakes.trained import make_samples

SYSTEM, ASKED = {"role": "system", "content": "It is nine."}, {"role": "user", "content": "2+2?"}
ANSWER = {
    "role": "assistant",
    "content": "\n\nLet me see.",
    "reasoning_content": "Hm.",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 2, "b": 2}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "4"}
TOOL = {"type": "function", "function": {"name": "sum"}}
EARLIER = {"messages": [SYSTEM, ASKED, ANSWER], "tools": [TOOL]}


def later(place: int = 0, tools: tuple[Any, ...] = (TOOL,), **changed: Any) -> dict[str, Any]:
    """What an agent sends that goes on from EARLIER, with its message at `place` changed."""
    messages = [SYSTEM, ASKED, ANSWER, RESULT]
    messages[place] = {**messages[place], **changed}
    return {"messages": messages, "tools": list(tools)}


def called(arguments: str) -> list[dict[str, Any]]:
    return [{"id": "1", "function": {"name": "sum", "arguments": arguments}}]


@pytest.mark.parametrize(
    "chat",
    [
        later(),
        later(1, content=[{"type": "text", "text": "2+2?"}]),
        later(2, content="Let me see.", reasoning_content=None),
        later(2, tool_calls=called('{"b":2,"a":2}')),
        {"messages": [SYSTEM, ASKED], "tools": [TOOL]},
    ],
)
def test_what_an_agent_only_wrote_otherwise_is_not_rewritten(chat: dict[str, Any]) -> None:
    assert not is_rewritten(EARLIER, chat)


@pytest.mark.parametrize(
    "chat",
    [
        later(0, content="It is ten."),
        later(1, role="system"),
        later(2, content="I see."),
        later(2, tool_calls=called('{"a": 2}')),
        later(2, tool_calls=called("no JSON")),
        later(2, tool_calls=None),
        later(tools=(TOOL, TOOL)),
        later(tools=()),
    ],
)
def test_a_changed_instruction_answer_call_or_list_of_tools_is_rewritten(chat: dict[str, Any]) -> None:
    assert is_rewritten(EARLIER, chat)


def request(chat: dict[str, Any], answer: dict[str, Any], **body: Any) -> dict[str, Any]:
    return {"dialect": "chat", "request": {**chat, **body}, "response": {"choices": [{"message": answer}]}}


ASKING = request({"messages": [SYSTEM, ASKED], "tools": [TOOL]}, ANSWER)
DONE = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("cause", "asked", "expected"),
    [
        ("template", request(later(0, content="It is ten."), DONE), REWRITTEN),
        ("template", request(later(), DONE), "template"),
        ("template", request({"messages": [SYSTEM, ASKED], "tools": [TOOL]}, DONE), "template"),
        ("template", {"dialect": "completions", "request": {"prompt": "2+2?"}, "response": {}}, "template"),
        ("template", request(later(0, content="It is ten."), DONE, previous_response_id="x"), "template"),
        ("template", None, "template"),
        ("trimmed", request(later(0, content="It is ten."), DONE), "trimmed"),
    ],
)
def test_of_histories_that_read_differently_those_that_the_agent_sent_so_are_told_apart(
    cause: str, asked: dict[str, Any] | None, expected: str
) -> None:
    built = make_samples(samples=2)
    first, second = built.samples
    split = replace(second, broke=Break(cause, "c1", "c0", "be kind", "yes", "no"))
    built = replace(built, samples=(first, split), report=replace(built.report, splits={cause: 1, "other": 1}))
    found = judged(built, {"c0": ASKING} | ({"c1": asked} if asked else {}))
    assert [sample.split for sample in found.samples] == [None, expected]
    assert found.report.splits == {expected: 1, "other": 1}
    assert found.samples[1].broke == Break(expected, "c1", "c0", "be kind", "yes", "no")
