"""A recorded call as one chat body: the same conversation is the same, whatever the harness spoke."""

from __future__ import annotations

from typing import Any

import pytest

from agl_runtime.gateway.capture import read_answer, read_partial
from agl_runtime.gateway.dialects import Dialect, all_dialects
from agl_runtime.gateway.internal import CallRefused

Raw = dict[str, Any]
DIALECTS = {dialect.name: dialect for dialect in all_dialects().values()}
SCHEMA: Raw = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}


def call(call_id: str, arguments: str) -> Raw:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


def said(call_id: str, a: str) -> Raw:
    calls = [call(call_id, f'{{"a": {a}}}')]
    return {"role": "assistant", "content": "I add.", "reasoning_content": "Hm.", "tool_calls": calls}


TALK = [SYSTEM, ASKED, said("c1", "2"), {"role": "tool", "tool_call_id": "c1", "content": "2"}]
REQUESTS: dict[str, Raw] = {
    "chat": {"messages": TALK, "tools": [{"type": "function", "function": ADD}]},
    "responses": {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "2+2?"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "I add."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "tools": [{"type": "function", **ADD}],
    },
    "messages": {
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "2+2?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "I add."},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    },
}


def answered(dialect: Dialect, body: Raw, message: Raw) -> Raw:
    """The answer as it is recorded."""
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return dialect.render(dialect.parse(body), read_answer({"id": "x", "choices": [choice]}))


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("answer", [said("c2", "4"), {"role": "assistant", "content": ""}])
def test_a_request_and_its_answer_are_one_chat_body(name: str, answer: Raw) -> None:
    dialect, body = DIALECTS[name], REQUESTS[name]
    found = dialect.conversation(body, answered(dialect, body, answer))
    assert found["messages"] == [*TALK, answer]
    assert found["tools"] == [{"type": "function", "function": ADD}]


@pytest.mark.parametrize("name", REQUESTS)
def test_an_error_or_nothing_adds_no_message(name: str) -> None:
    dialect = DIALECTS[name]
    for response in ({}, dialect.error(CallRefused("No.", http_status=500))):
        assert dialect.conversation(REQUESTS[name], response)["messages"] == TALK


@pytest.mark.parametrize("name", REQUESTS)
def test_what_had_come_of_a_cut_answer_is_kept(name: str) -> None:
    dialect, body = DIALECTS[name], REQUESTS[name]
    begun = {"index": 0, "message": {"role": "assistant", "content": "It i"}, "finish_reason": None}
    partial = dialect.render(dialect.parse(body), read_partial({"id": "x", "choices": [begun]}))
    response = {**partial, **dialect.error(CallRefused("No.", http_status=502))}
    assert dialect.conversation(body, response)["messages"][-1] == {"role": "assistant", "content": "It i"}


def test_a_freeform_tool_is_the_function_that_the_model_was_shown() -> None:
    dialect = DIALECTS["responses"]
    body = {"input": "Fix it.", "tools": [{"type": "custom", "name": "patch"}]}
    function = {"name": "patch", "arguments": '{"input": "+ 1"}'}
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    found = dialect.conversation(body, answered(dialect, body, answer))
    assert found["messages"] == [{"role": "user", "content": "Fix it."}, answer]
    assert [tool["function"]["name"] for tool in found["tools"]] == ["patch"]


def test_a_completion_is_a_prompt_and_its_continuation() -> None:
    dialect, prompt = DIALECTS["completions"], {"role": "prompt", "content": "Once"}
    continued = {"role": "assistant", "content": " upon"}
    assert dialect.conversation({"prompt": "Once"}, {"choices": [{"text": " upon"}]}) == {
        "messages": [prompt, continued]
    }
    assert dialect.conversation({"prompt": "Once"}, {}) == {"messages": [prompt]}
