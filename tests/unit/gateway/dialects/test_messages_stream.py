"""The order of a message's events, and that the official client puts the same message together as is recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_runtime.gateway.dialects.messages import MessagesDialect
from agl_runtime.gateway.internal import Answer as Recorded
from agl_runtime.gateway.internal import ModelRequest
from fakes.messages import events, order, play, read_by_client
from fakes.model_server import Answer, chat_chunks, tool_call, whole_answer

DIALECT = MessagesDialect()
FORCED = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True, "logprobs": True}
MOST = Answer("I look", reasoning="hm", tool_calls=[tool_call("look", {"at": "it"}, "c1"), tool_call("now", {}, "c2")])


def asked(**body: Any) -> ModelRequest:
    return DIALECT.parse({"model": "m", "max_tokens": 9, "messages": FORCED["messages"], **body})


def told(answer: Answer, request: ModelRequest | None = None) -> tuple[bytes, bytes, Recorded]:
    chunks = list(chat_chunks(whole_answer("chat/completions", FORCED, answer, "policy")))
    return play(DIALECT.stream(request or asked()), [*chunks, {"choices": [], "usage": {"completion_tokens": 7}}])


def call_chunks(*pieces: dict[str, Any], finish: str = "tool_calls") -> list[dict[str, Any]]:
    deltas = [{"role": "assistant"}, *({"tool_calls": [piece]} for piece in pieces)]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}]


def opening(call_id: str, name: str, index: int = 0, arguments: str = "") -> dict[str, Any]:
    return {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def more(arguments: str, index: int = 0) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments}}


def check_same(request: ModelRequest, data: bytes, recorded: Recorded) -> Message:
    """The client reads from the stream what is recorded, and from a replay of the record too."""
    whole = DIALECT.render(request, recorded)
    Message.model_validate(whole)
    read = read_by_client(data)
    assert read.model_dump(mode="json", include=set(whole)) == Message.model_validate(whole).model_dump(
        mode="json", include=set(whole)
    )
    assert read_by_client(DIALECT.replay(request, whole)).model_dump() == read.model_dump()
    return read


def test_the_events_of_a_text() -> None:
    before, after, _ = told(Answer("the sum is"))
    assert order(before) == ["start", "0 text", "0 text_delta", "0 text_delta", "0 text_delta"]
    assert order(after) == ["0 stop", "delta", "stop"]
    assert [e["delta"]["text"] for e in events(before)[2:]] == ["the ", "sum ", "is"]


def test_the_events_of_thinking_text_and_two_calls() -> None:
    before, after, _ = told(MOST)
    assert order(before) == [
        *("start", "0 thinking", "0 thinking_delta", "0 signature_delta", "0 stop"),
        *("1 text", "1 text_delta", "1 text_delta", "1 stop"),
        *("2 tool_use", "2 input_json_delta", "2 input_json_delta"),
    ]
    assert order(after) == ["2 stop", "3 tool_use", "3 stop", "delta", "stop"]


def test_no_tool_call_stops_before_the_record() -> None:
    before, _, _ = told(MOST)
    stopped = {event["index"] for event in events(before) if event["type"] == "content_block_stop"}
    tools = {event["index"] for event in events(before) if event.get("content_block", {}).get("type") == "tool_use"}
    assert tools
    assert not tools & stopped


def test_the_start_tells_the_prompts_tokens_and_the_end_those_of_the_answer() -> None:
    before, after, recorded = told(Answer("yes"))
    start, end = events(before)[0]["message"], events(after)[-2]
    assert start["usage"]["input_tokens"] == recorded.prompt_ids.size
    assert (start["stop_reason"], start["content"]) == (None, [])
    assert end["usage"]["output_tokens"] == 7
    assert (end["usage"]["cache_read_input_tokens"], end["usage"]["cache_creation_input_tokens"]) == (0, 0)


@pytest.mark.parametrize(
    "answer",
    [
        Answer("plain"),
        Answer(""),
        Answer("so", reasoning="because\n"),
        Answer("", tool_calls=[tool_call("now", {})]),
        Answer("", tool_calls=[tool_call("set", {"on": True, "off": False, "n": None, "é": '\u2028"\\'})]),
        MOST,
        Answer("cut off he", finish_reason="length"),
    ],
    ids=["text", "empty", "thinking", "no-parameters", "booleans", "all", "length"],
)
def test_the_official_client_reads_what_is_recorded(answer: Answer) -> None:
    request = asked(stream=True)
    before, after, recorded = told(answer, request)
    check_same(request, before + after, recorded)


def test_arguments_may_be_split_anywhere() -> None:
    arguments = json.dumps({"path": "a/é", "on": False, "n": -1.5e3, "deep": [{"x": None}], "q": '"\\'})
    for cut in range(len(arguments) + 1):
        request = asked(stream=True)
        pieces = opening("c1", "f"), more(arguments[:cut]), more(arguments[cut:])
        before, after, recorded = play(DIALECT.stream(request), call_chunks(*pieces))
        parts = [e["delta"]["partial_json"] for e in events(before + after) if e["type"] == "content_block_delta"]
        assert "".join(parts) == arguments
        assert check_same(request, before + after, recorded).content[0].input == json.loads(arguments)  # type: ignore[union-attr]


@given(st.lists(st.dictionaries(st.text(max_size=4), st.text() | st.booleans() | st.none(), max_size=4), max_size=3),
       st.data())  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_calls_split_and_mixed_at_random_are_read_whole(inputs: list[dict[str, Any]], data: st.DataObject) -> None:
    queues = []
    for index, given_input in enumerate(inputs):
        rest, pieces = json.dumps(given_input, ensure_ascii=False), [opening(f"c{index}", "f", index)]
        while rest:
            size = data.draw(st.integers(1, len(rest)))
            pieces.append(more(rest[:size], index))
            rest = rest[size:]
        queues.append(pieces)
    mixed = [queue.pop(0) for queue in queues]
    while queues := [queue for queue in queues if queue]:
        mixed.append(data.draw(st.sampled_from(queues)).pop(0))
    request = asked(stream=True)
    before, after, recorded = play(DIALECT.stream(request), call_chunks(*mixed))
    message = check_same(request, before + after, recorded)
    assert [(block.id, block.input) for block in message.content] == [  # type: ignore[union-attr]
        (f"c{index}", given_input) for index, given_input in enumerate(inputs)
    ]


def test_long_arguments_come_as_they_are_sampled() -> None:
    text = json.dumps({"content": "x" * 5000})
    pieces = [opening("c1", "write"), *(more(text[at : at + 10]) for at in range(0, len(text), 10))]
    before, after, _ = play(DIALECT.stream(asked()), call_chunks(*pieces))
    deltas = [e for e in events(before) if e["type"] == "content_block_delta"]
    assert len(deltas) > 80
    assert sum(len(e["delta"]["partial_json"]) for e in deltas) > 0.95 * len(text)
    assert "".join(e["delta"]["partial_json"] for e in events(before + after)[2:-3]) == text


@pytest.mark.parametrize("text", ["add 1 and 2", "[1, 2]", "7", '"x"', "null", "NaN"])
def test_arguments_that_are_no_object_reach_the_harness_as_text_in_one(text: str) -> None:
    request = asked(stream=True)
    before, after, recorded = play(DIALECT.stream(request), call_chunks(opening("c1", "f"), more(text)))
    message = check_same(request, before + after, recorded)
    assert message.content[0].input == {"unparsed_arguments": text}  # type: ignore[union-attr]
    assert (message.content[0].id, message.stop_reason) == ("c1", "tool_use")  # type: ignore[union-attr]


def test_arguments_that_go_wrong_later_do_not_break_the_client() -> None:
    pieces = opening("c1", "f"), more('{"a": 1, '), more("b: 2}"), more(" and so on")
    before, after, recorded = play(DIALECT.stream(asked()), call_chunks(*pieces))
    assert read_by_client(before + after).content[0].input == {"a": 1}  # type: ignore[union-attr]
    whole = DIALECT.render(asked(), recorded)
    assert whole["content"][0]["input"] == {"unparsed_arguments": '{"a": 1, b: 2} and so on'}


def test_a_truncated_call_is_told_as_far_as_it_came() -> None:
    request = asked(stream=True)
    chunks = call_chunks(opening("c1", "f"), more('{"command": "rm -r'), finish="length")
    before, after, recorded = play(DIALECT.stream(request), chunks)
    assert order(after) == ["0 stop", "delta", "stop"]
    message = read_by_client(before + after)
    assert (message.stop_reason, message.content[0].input) == ("max_tokens", {})  # type: ignore[union-attr]
    whole = DIALECT.render(request, recorded)
    assert whole["content"][0]["input"] == {"unparsed_arguments": '{"command": "rm -r'}


def test_calls_without_an_index_are_each_told_with_their_own_input() -> None:
    pieces = [opening("c1", "now"), opening("c2", "look", arguments='{"at": "it"}')]
    for piece in pieces:
        del piece["index"]
    request = asked()
    before, after, recorded = play(DIALECT.stream(request), call_chunks(*pieces))
    read = check_same(request, before + after, recorded)
    assert [(block.name, block.input) for block in read.content] == [("now", {}), ("look", {"at": "it"})]


def test_a_call_beside_one_without_a_name_is_told_once() -> None:
    pieces = [opening("c1", ""), opening("c2", "look", index=1, arguments="{}")]
    before, after, _ = play(DIALECT.stream(asked()), call_chunks(*pieces))
    assert sorted(block.name for block in read_by_client(before + after).content) == ["", "look"]


def test_what_comes_after_a_call_is_told_at_the_end() -> None:
    chunks = call_chunks(opening("c1", "f"), more("{}"))
    late = {"choices": [{"index": 0, "delta": {"content": "also", "reasoning": "late"}, "finish_reason": None}]}
    request = asked(stream=True)
    before, after, recorded = play(DIALECT.stream(request), [*chunks[:-1], late, chunks[-1]])
    assert order(before) == ["start", "0 tool_use", "0 input_json_delta"]
    assert [block.type for block in read_by_client(before + after).content] == ["tool_use", "thinking", "text"]
    assert [block["type"] for block in DIALECT.render(request, recorded)["content"]] == ["thinking", "text", "tool_use"]


def test_the_name_that_newer_servers_give_reasoning_is_known() -> None:
    chunk = {"choices": [{"index": 0, "delta": {"reasoning": "hm"}, "finish_reason": None}]}
    assert order(DIALECT.stream(asked()).feed(chunk)) == ["start", "0 thinking", "0 thinking_delta"]


def test_pings_and_comments_anywhere_are_not_seen_by_the_client() -> None:
    before, after, _ = told(MOST)
    assert events(DIALECT.keep_alive) == [{"type": "ping"}]
    for quiet in (DIALECT.keep_alive, b": keep-alive\n\n"):
        parts = [part + b"\n\n" for part in (before + after).split(b"\n\n")[:-1]]
        assert read_by_client(quiet + quiet.join(parts) + quiet) == read_by_client(before + after)
