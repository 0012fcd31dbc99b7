"""Whole messages, their reasons to stop, and errors, as Anthropic's clients read them."""

from __future__ import annotations

from typing import Any

import anthropic
import orjson
import pytest
from anthropic.types import ErrorResponse, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_runtime.gateway.capture import StreamAssembler, read_answer, read_partial
from agl_runtime.gateway.dialects.messages import MessagesDialect
from agl_runtime.gateway.internal import CallRefused, ModelRequest
from fakes.messages import events, read_by_client

DIALECT = MessagesDialect()


def asked(**body: Any) -> ModelRequest:
    return DIALECT.parse({"model": "claude-x", "messages": [{"role": "user", "content": "hi"}], **body})


def rendered(message: dict[str, Any], finish: str | None = "stop", **choice: Any) -> Message:
    row = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, **choice}
    usage = {"prompt_tokens": 11, "completion_tokens": 3}
    answer = read_answer({"id": "x", "model": "policy", "choices": [row], "usage": usage})
    return Message.model_validate(DIALECT.render(asked(), answer))


def test_a_message_is_whole() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"on": true}'}}
    message = rendered({"content": "so", "reasoning_content": " hm\n", "tool_calls": [call]}, "tool_calls")
    thinking, text, tool = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == " hm\n"
    assert thinking.signature == f"agl.{message.id}"
    assert text.type == "text"
    assert text.text == "so"
    assert tool.type == "tool_use"
    assert (tool.id, tool.name, tool.input) == ("c1", "f", {"on": True})
    assert (message.model, message.role, message.stop_reason) == ("claude-x", "assistant", "tool_use")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (11, 3)
    assert (message.usage.cache_read_input_tokens, message.usage.cache_creation_input_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("finish", "matched", "reason"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 151645, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("content_filter", None, ("refusal", None)),
    ],
)
def test_why_an_answer_stopped(finish: str, matched: Any, reason: tuple[str, str | None]) -> None:
    message = rendered({"content": "x"}, finish, stop_reason=matched)
    assert (message.stop_reason, message.stop_sequence) == reason


def test_a_call_that_a_server_ends_with_stop_is_a_tool_use() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    assert rendered({"content": None, "tool_calls": [call]}).stop_reason == "tool_use"


def test_every_message_has_an_id_of_its_own() -> None:
    assert asked().side["message_id"] != asked().side["message_id"]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_shape(status: int, kind: str) -> None:
    error = DIALECT.error(CallRefused("What.", "Fix.", http_status=status))
    assert error == {"type": "error", "error": {"type": kind, "message": "What. Fix."}}
    if kind != "request_too_large":  # the one that the package has no type for
        ErrorResponse.model_validate({**error, "request_id": None})


def test_an_error_within_a_stream_is_raised_by_the_client() -> None:
    start = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
    stream = DIALECT.stream(asked())
    data = stream.feed(start) + stream.fail(CallRefused("Broken.", http_status=502))
    assert events(data)[-1]["error"] == {"type": "api_error", "message": "Broken."}
    with pytest.raises(anthropic.APIStatusError, match=r"Broken\."):
        read_by_client(data)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "This model's maximum context length is 64 tokens; the prompt has 90.",
            "prompt is too long: 90 tokens > 64 maximum",
        ),
        (
            "This model's maximum context length is 2048 tokens. However, your request has 3000 input tokens.",
            "prompt is too long: 3000 tokens > 2048 maximum",
        ),
        (
            "This model's maximum context length is 2048 tokens. However, you requested 4096 output tokens and your "
            "prompt contains 13 input tokens, for a total of 4109 tokens.",
            "input length and `max_tokens` exceed context limit: 13 + 4096 > 2048, decrease one of them and try again",
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 4096. This model's maximum context length is 2048 "
            "tokens and your request has 13 input tokens (4096 > 2048 - 13).",
            "input length and `max_tokens` exceed context limit: 13 + 4096 > 2048, decrease one of them and try again",
        ),
        ("The maximum context length was passed.", "prompt is too long: The maximum context length was passed."),
    ],
)
def test_a_context_overflow_is_told_in_the_words_that_claude_code_knows(said: str, told: str) -> None:
    error = DIALECT.error(CallRefused(said, http_status=400, reason="context_overflow"))
    assert error["error"] == {"type": "invalid_request_error", "message": told}


KEYS = ["content", "reasoning_content", "reasoning", "tool_calls", "function", "name", "arguments", "index", "id"]
odd = st.none() | st.booleans() | st.integers(-1, 2) | st.text(max_size=4) | st.sampled_from(['{"a": 1}', "[" * 300])
values = st.recursive(
    odd, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
)
calls = st.fixed_dictionaries({}, optional={"index": odd, "id": odd, "function": st.dictionaries(st.sampled_from(["name", "arguments"]), odd)})  # fmt: skip  # noqa: E501
deltas = st.dictionaries(st.sampled_from(KEYS), values, max_size=4) | st.fixed_dictionaries(
    {"tool_calls": st.lists(calls, max_size=3)}, optional={"content": odd}
)


@given(st.lists(deltas, max_size=5))
@settings(max_examples=60, deadline=None)
def test_whatever_a_model_server_says_becomes_a_message_that_clients_can_read(said: list[dict[str, Any]]) -> None:
    request, assembler = asked(stream=True), StreamAssembler()
    stream, data = DIALECT.stream(request), b""
    for delta in said:
        chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        assembler.feed(chunk)
        data += stream.feed(chunk)
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    assembler.feed(last)
    answer = read_partial(assembler.response())
    data += stream.feed(last) + stream.end(answer)
    assert events(data)[-1] == {"type": "message_stop"}
    read_by_client(data)
    whole = DIALECT.render(request, answer)
    Message.model_validate(whole)
    assert orjson.dumps(whole)
    read_by_client(DIALECT.replay(request, whole))
