"""What a harness that speaks the Responses API sees of answers, streams and errors."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from agl_runtime.gateway.capture import StreamAssembler, read_answer, read_partial
from agl_runtime.gateway.dialects.reasoning import unseal
from agl_runtime.gateway.dialects.responses import ResponsesDialect
from agl_runtime.gateway.internal import CallRefused, ModelRequest
from fakes.model_server import Answer, chat_chunks, tool_call, whole_answer

Raw = dict[str, Any]
DIALECT = ResponsesDialect()
FORCED: Raw = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True, "logprobs": True}
ADD = {"type": "function", "name": "add", "parameters": {}, "strict": None}
PATCH = {"type": "custom", "name": "apply_patch"}
FS = {"type": "namespace", "name": "mcp__fs", "description": "", "tools": [ADD]}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXT_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"]
TEXT_EVENTS += ["content_part.done", "output_item.done"]


def request(**body: Any) -> ModelRequest:
    return DIALECT.parse({"model": "m", "input": "hi", "tools": [ADD, PATCH, FS], **body})


def whole(answer: Answer) -> Raw:
    return whole_answer("chat/completions", FORCED, answer, "policy")


def render(answer: Answer, **body: Any) -> Raw:
    return DIALECT.render(request(**body), read_answer(whole(answer)))


def events(data: bytes) -> list[Raw]:
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        kind, _, line = block.partition("\n")
        found.append(orjson.loads(line.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def streamed(response: Raw, asked: ModelRequest | None = None) -> tuple[list[Raw], list[Raw]]:
    """The events before the call is on record, and those after."""
    asked = asked or request()
    stream, assembler = DIALECT.stream(asked), StreamAssembler()
    *early, last = chat_chunks(response)
    for chunk in [*early, last]:
        assembler.feed(chunk)
    before = b"".join(stream.feed(chunk) for chunk in early)
    whole_again = {**assembler.response(), "usage": response["usage"]}
    return events(before), events(stream.feed(last) + stream.end(read_answer(whole_again)))


def kinds(told: list[Raw]) -> list[str]:
    """The kinds of events, the many deltas of one text as one."""
    names = [event["type"].removeprefix("response.") for event in told]
    return [name for i, name in enumerate(names) if name != names[i - 1] or not name.endswith("delta")]


def test_a_whole_answer_is_what_the_official_package_calls_a_response() -> None:
    response = render(
        Answer("so", reasoning="hm", tool_calls=[tool_call("add", {"a": 1}), tool_call("made_up", {}, "c2")]),
        instructions="be brief",
        metadata={"a": "b"},
        temperature=0.5,
        tool_choice="auto",
    )
    read = Response.model_validate(response)
    assert (read.status, read.output_text, read.instructions, read.temperature) == ("completed", "so", "be brief", 0.5)
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert response["output"][2] == {
        "type": "function_call",
        "id": f"fc_{read.id.removeprefix('resp_')}_0",
        "call_id": "call_1",
        "name": "add",
        "arguments": '{"a": 1}',
        "status": "completed",
    }
    assert unseal(response["output"][0]["encrypted_content"]) == (response["id"], "hm")
    assert read.usage is not None
    assert read.usage.total_tokens == read.usage.input_tokens + read.usage.output_tokens > 0
    assert "token_ids" not in json.dumps(response)


def test_usage_keeps_the_details_that_the_model_server_tells() -> None:
    response = whole(Answer("so"))
    response["usage"] |= {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": None}
    usage = DIALECT.render(request(), read_answer(response))["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 3, "cache_write_tokens": 0}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_counts_that_no_answer_can_have_are_not_told() -> None:
    response = whole(Answer("so"))
    response["usage"] = {"prompt_tokens": 2**63, "completion_tokens": 2**63}
    usage = DIALECT.render(request(), read_answer(response))["usage"]
    assert usage["output_tokens"] == len(b"so</>")
    assert orjson.dumps(usage)


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter"), ("stop", None)]
)
def test_how_an_answer_ended(finish: str, reason: str | None) -> None:
    response = render(Answer("so", finish_reason=finish))
    assert response["incomplete_details"] == (reason and {"reason": reason})
    assert response["status"] == response["output"][0]["status"] == ("incomplete" if reason else "completed")
    Response.model_validate(response)


def test_calls_come_back_as_the_tools_that_the_harness_knows() -> None:
    calls = [tool_call("mcp__fs__add", {}), tool_call("apply_patch", {"input": "a\nb"}, "c2")]
    add, patch = render(Answer("", tool_calls=calls))["output"]
    assert (add["type"], add["name"], add["namespace"]) == ("function_call", "add", "mcp__fs")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "a\nb")


def test_arguments_that_do_not_parse_reach_the_harness_as_they_were_sampled() -> None:
    calls = [tool_call("add", {}), tool_call("apply_patch", {"patch": "x"}, "c2")]
    calls[0]["function"]["arguments"] = '{"a": '
    add, patch = render(Answer("", tool_calls=calls))["output"]
    assert (add["arguments"], patch["input"]) == ('{"a": ', '{"patch": "x"}')


def test_an_empty_answer_is_an_empty_text() -> None:
    (message,) = render(Answer(""))["output"]
    assert message["content"][0]["text"] == ""
    before, after = streamed(whole(Answer("")))
    assert kinds(before + after) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_an_answer_that_broke_off_is_recorded_as_incomplete() -> None:
    response = whole(Answer("so"))
    response["choices"][0]["finish_reason"] = None
    assert DIALECT.render(request(), read_partial(response))["status"] == "incomplete"


def test_the_order_of_a_streams_events() -> None:
    calls = [tool_call("add", {"a": 1}), tool_call("apply_patch", {"input": "a\nb"}, "c2")]
    before, after = streamed(whole(Answer("so it is", reasoning="hm", tool_calls=calls)))
    reasoning = [event.replace("output_text", "reasoning_text") for event in TEXT_EVENTS]
    call = ["output_item.added", "function_call_arguments.delta"]
    patch = ["output_item.added", "custom_tool_call_input.delta"]
    assert kinds(before) == ["created", "in_progress", *reasoning, *TEXT_EVENTS, *call, *patch]
    call_done = ["function_call_arguments.done", "output_item.done"]
    assert kinds(after) == [*call_done, "custom_tool_call_input.done", "output_item.done", "completed"]
    told = before + after
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    for event in told:
        EVENT.validate_python(event)
    assert [e["output_index"] for e in told if e["type"] == "response.output_item.done"] == [0, 1, 2, 3]
    assert [e["item"] for e in told if e["type"] == "response.output_item.done"] == after[-1]["response"]["output"]


def test_deltas_are_those_of_the_model_server() -> None:
    before, _ = streamed(whole(Answer("one two three")))
    assert [e["delta"] for e in before if e["type"].endswith("delta")] == ["one ", "two ", "thre", "e"]


def test_nothing_completes_a_call_before_it_is_on_record() -> None:
    before, after = streamed(whole(Answer("", tool_calls=[tool_call("add", {"a": 1}), tool_call("add", {}, "c2")])))
    assert not any(event["type"].endswith(("done", "completed")) for event in before)
    assert kinds(after).count("output_item.done") == 2


def test_a_stream_ends_with_the_answer_that_is_recorded() -> None:
    asked = request(stream=True)
    response = whole(Answer("so", reasoning="hm", tool_calls=[tool_call("apply_patch", {"input": "é\n"})]))
    assert streamed(response, asked)[1][-1]["response"] == DIALECT.render(asked, read_answer(response))


@given(st.text(max_size=8), st.data())
def test_a_freeform_input_is_told_in_full_wherever_its_arguments_are_cut(text: str, data: st.DataObject) -> None:
    arguments = json.dumps({"input": text})
    cuts = sorted({0, len(arguments), *data.draw(st.lists(st.integers(0, len(arguments)), max_size=4))})
    stream = DIALECT.stream(request())
    told = events(stream.feed(chunk(tool_calls=[{"index": 0, **tool_call("apply_patch", {}), "function": NAMED}])))
    for start, end in pairwise(cuts):
        told += events(stream.feed(chunk(tool_calls=[{"index": 0, "function": {"arguments": arguments[start:end]}}])))
    told += events(stream.end(read_answer(whole(Answer("", tool_calls=[tool_call("apply_patch", {"input": text})])))))
    assert "".join(event["delta"] for event in told if event["type"].endswith("input.delta")) == text
    assert [event["input"] for event in told if event["type"].endswith("input.done")] == [text]


NAMED = {"name": "apply_patch", "arguments": ""}


def chunk(**delta: Any) -> Raw:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


@pytest.mark.parametrize("broken", ['{"patch": "x"}', "", "*** Begin", '{"input": "a', '{"why": 1, "input": "x"}'])
def test_a_freeform_call_of_another_form_is_told_once(broken: str) -> None:
    call = tool_call("apply_patch", {})
    call["function"]["arguments"] = broken
    before, after = streamed(whole(Answer("", tool_calls=[call])))
    item = after[-1]["response"]["output"][0]
    deltas = [event["delta"] for event in before + after if event["type"].endswith("input.delta")]
    assert "".join(deltas) == item["input"]


def test_a_call_without_a_name_is_told_at_the_end() -> None:
    call = tool_call("", {"a": 1})
    before, after = streamed(whole(Answer("so", tool_calls=[call])))
    assert kinds(before)[-1] == "output_text.delta"
    assert after[-1]["response"]["output"][1]["name"] == ""
    told = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(after)[-5:] == [*told, "completed"]


def test_calls_without_an_index_are_each_told_with_their_own_arguments() -> None:
    stream, assembler = DIALECT.stream(request()), StreamAssembler()
    calls = [{"id": f"c{n}", "function": {"name": "add", "arguments": f'{{"a": {n}}}'}} for n in (1, 2)]
    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in calls]
    told = events(b"".join(stream.feed(chunk) for chunk in chunks))
    for chunk in [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}]:
        assembler.feed(chunk)
    told += events(stream.end(read_answer(assembler.response())))
    done = [(e["output_index"], e["arguments"]) for e in told if e["type"].endswith("arguments.done")]
    assert done == [(0, '{"a": 1}'), (1, '{"a": 2}')]
    assert [(e["output_index"], e["delta"]) for e in told if e["type"].endswith("arguments.delta")] == done


def test_a_call_that_was_cut_off_is_never_completed() -> None:
    call = tool_call("add", {})
    call["function"]["arguments"] = '{"a": 1'
    response = whole(Answer("so", tool_calls=[tool_call("add", {}, "c0"), call]))
    response["choices"][0]["finish_reason"] = "length"
    before, after = streamed(response)
    assert [event["item"]["call_id"] for event in after if event["type"].endswith("item.done")] == ["c0"]
    assert after[-1]["type"] == "response.incomplete"
    assert [item["type"] for item in after[-1]["response"]["output"]] == ["message", "function_call"]
    assert len(before) > len(after)


def test_a_model_that_goes_back_to_its_reasoning_gets_another_item() -> None:
    stream = DIALECT.stream(request())
    told = events(
        b"".join(stream.feed(chunk(**delta)) for delta in ({"reasoning": "a"}, {"content": "b"}, {"reasoning": "c"}))
    )
    added = [event["item"]["id"] for event in told if event["type"].endswith("item.added")]
    assert len(set(added)) == 3


def test_a_recorded_answer_is_replayed_as_a_stream() -> None:
    calls = [tool_call("add", {"a": 1}), tool_call("apply_patch", {"input": "x"}, "c2")]
    response = render(Answer("so", reasoning="hm", tool_calls=calls))
    told = events(DIALECT.replay(request(stream=True), response))
    assert told[-1]["response"] == response
    assert told[0]["response"] == {**response, "status": "in_progress", "output": [], "usage": None}
    assert [event["item"] for event in told if event["type"].endswith("item.done")] == response["output"]
    for event in told:
        EVENT.validate_python(event)


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (CallRefused("Too long.", http_status=400, code="context_length_exceeded"), "context_length_exceeded"),
        (CallRefused("Held.", http_status=429, code="gateway_paused"), "rate_limit_exceeded"),
        (CallRefused("Bad.", http_status=422), "invalid_prompt"),
        (CallRefused("Broke.", http_status=502), "server_error"),
    ],
)
def test_a_stream_that_fails_says_so_as_a_response(refused: CallRefused, code: str) -> None:
    told = events(DIALECT.stream(request()).fail(refused))
    assert kinds(told) == ["created", "in_progress", "failed"]
    assert told[-1]["response"]["error"] == {"code": code, "message": str(refused)}
    assert told[-1]["response"]["id"] == told[0]["response"]["id"]
    stream = DIALECT.stream(request())
    stream.feed(chunk(content="so"))
    assert kinds(events(stream.fail(refused))) == ["failed"]


def test_a_stream_that_fails_says_when_to_try_again() -> None:
    refused = CallRefused("Held.", http_status=429, code="gateway_paused", retry_after_s=5)
    assert events(DIALECT.stream(request()).fail(refused))[-1]["response"]["error"]["message"] == (
        "Held. Try again in 5s."
    )


def test_errors_before_an_answer_have_openais_shape() -> None:
    error = DIALECT.error(CallRefused("What.", "Fix.", http_status=400, code="c"))
    assert error == {"error": {"message": "What. Fix.", "type": "invalid_request_error", "param": None, "code": "c"}}


JUNK = st.recursive(
    st.none() | st.integers(-1, 2) | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["index", "id", "function", "name", "arguments"]), inner, max_size=3)
    ),
    max_leaves=5,
)
DELTAS = st.fixed_dictionaries({}, optional={key: JUNK for key in ("content", "reasoning_content", "tool_calls")})


@given(st.lists(st.none() | DELTAS, max_size=4), st.sampled_from(["stop", "length"]))
def test_whatever_a_model_server_says_a_stream_is_well_formed(deltas: list[Any], finish: str) -> None:
    asked, assembler = request(), StreamAssembler()
    stream = DIALECT.stream(asked)
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": finish}]})
    data = b""
    for part in chunks:
        assembler.feed(part)
        data += stream.feed(part)
    told = events(data + stream.end(read_answer(assembler.response())))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    Response.model_validate(told[-1]["response"])
