"""What a harness sees of an answer, a stream and an error, in each dialect."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from agl_runtime.gateway.capture import read_answer
from agl_runtime.gateway.dialects import Dialect, all_dialects
from agl_runtime.gateway.internal import CallRefused, ModelRequest
from fakes.model_server import Answer, chat_chunks, text_chunks, tool_call, whole_answer

MESSAGES = [{"role": "user", "content": "hi"}]
FORCED = {"messages": MESSAGES, "prompt": "hi", "return_token_ids": True, "logprobs": True}
CHAT = all_dialects()["openai/v1/chat/completions"]
TEXT = all_dialects()["openai/v1/completions"]
VERSIONS = [{"version": "1.1", "start": 0, "end": 3}]


def request(dialect: Dialect, **body: Any) -> ModelRequest:
    return dialect.parse({"messages": MESSAGES, "prompt": "hi", **body})


def whole(dialect: Dialect, answer: Answer) -> dict[str, Any]:
    return whole_answer(dialect.path.removeprefix("openai/v1/"), FORCED, answer, "policy")


def events(data: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    assert lines[-1] == b"[DONE]"
    return [orjson.loads(line) for line in lines[:-1]]


def streamed(dialect: Dialect, asked: ModelRequest, answer: Answer) -> list[dict[str, Any]]:
    response = whole(dialect, answer)
    chunks = [*(chat_chunks(response) if dialect is CHAT else text_chunks(response))]
    stream = dialect.stream(asked)
    usage = {"id": "x", "choices": [], "usage": response["usage"]}
    data = b"".join(stream.feed(chunk) for chunk in [*chunks, usage])
    return events(data + stream.end(read_answer(response)))


@pytest.mark.parametrize("dialect", [CHAT, TEXT])
def test_what_was_not_asked_for_is_taken_out_of_a_whole_answer(dialect: Dialect) -> None:
    response = whole(dialect, Answer("yes", versions=VERSIONS))
    slim = dialect.render(request(dialect), read_answer(response))
    assert "prompt_token_ids" not in slim
    assert not {"token_ids", "prompt_token_ids", "weight_versions"} & slim["choices"][0].keys()
    assert slim["choices"][0]["logprobs"] is None
    assert slim["usage"] == response["usage"]
    assert response["choices"][0]["logprobs"] is not None


@pytest.mark.parametrize("dialect", [CHAT, TEXT])
def test_what_was_asked_for_stays(dialect: Dialect) -> None:
    response = whole(dialect, Answer("yes", versions=VERSIONS))
    asked = request(dialect, return_token_ids=True, logprobs=1)
    assert dialect.render(asked, read_answer(response)) == response


@pytest.mark.parametrize("dialect", [CHAT, TEXT])
def test_a_stream_without_extras_shows_only_what_the_model_said(dialect: Dialect) -> None:
    seen = streamed(dialect, request(dialect, stream=True), Answer("yes it is", versions=VERSIONS))
    assert not any(key in orjson.dumps(seen).decode() for key in ("token_ids", "usage", "weight_versions", "-0.1"))
    assert seen[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_chunk_that_held_only_ids_is_left_out_unless_they_were_asked_for() -> None:
    chunk = {"choices": [{"index": 0, "delta": {}, "token_ids": [4], "finish_reason": None}]}
    assert CHAT.stream(request(CHAT, stream=True)).feed(chunk) == b""
    asked = request(CHAT, stream=True, return_token_ids=True)
    assert orjson.loads(CHAT.stream(asked).feed(chunk)[6:]) == chunk


def test_the_usage_chunk_comes_where_it_was_asked_for() -> None:
    seen = streamed(CHAT, request(CHAT, stream=True, stream_options={"include_usage": True}), Answer("yes"))
    assert (seen[-1]["choices"], seen[-1]["usage"]["completion_tokens"]) == ([], 6)


def test_a_recorded_chat_answer_is_replayed_as_a_stream() -> None:
    response = whole(CHAT, Answer("so", tool_calls=[tool_call("f", {}, "c1"), tool_call("g", {}, "c2")]))
    asked = request(CHAT, stream=True, stream_options={"include_usage": True})
    first, usage = events(CHAT.replay(asked, response))
    assert first["choices"][0]["delta"]["content"] == "so"
    assert [call["index"] for call in first["choices"][0]["delta"]["tool_calls"]] == [0, 1]
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"] == response["usage"]


def test_a_recorded_completion_is_replayed_as_a_stream() -> None:
    (only,) = events(TEXT.replay(request(TEXT, stream=True), whole(TEXT, Answer("so"))))
    assert (only["choices"][0]["text"], only["choices"][0]["finish_reason"]) == ("so", "stop")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"messages": None}, "`messages` must be a list of at least one message object."),
        ({"messages": []}, "`messages` must be a list of at least one message object."),
        ({"messages": ["hi"]}, "`messages` must be a list of at least one message object."),
        ({"tools": {"a": 1}}, "`tools` must be a list of objects."),
        ({"stream": "yes"}, "`stream` must be true or false."),
        ({"stream_options": 1}, "`stream_options` must be an object."),
        ({"model": 5}, "`model` must be a string."),
    ],
)
def test_a_body_that_is_no_chat_request_is_refused_with_a_sentence(body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CallRefused) as caught:
        request(CHAT, **body)
    assert (str(caught.value), caught.value.http_status) == (sentence, 400)


def test_a_completion_needs_a_prompt() -> None:
    with pytest.raises(CallRefused, match="`prompt` must be a text or a list"):
        TEXT.parse({"model": "m"})


def test_unknown_fields_are_tolerated_and_kept() -> None:
    body = {"messages": MESSAGES, "prompt_cache_key": "k", "reasoning_effort": "low", "new_field": {"a": 1}}
    assert CHAT.parse(body).body == body


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (409, "conflict_error"), (502, "server_error")],
)
def test_errors_have_openais_shape(status: int, kind: str) -> None:
    refused = CallRefused("What.", "Fix.", http_status=status, code="some_code")
    expected = {"error": {"message": "What. Fix.", "type": kind, "param": None, "code": "some_code"}}
    assert CHAT.error(refused) == expected
    assert orjson.loads(CHAT.stream(request(CHAT)).fail(refused).removeprefix(b"data: ")) == expected
