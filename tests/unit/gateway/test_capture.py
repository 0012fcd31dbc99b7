"""Reading answers, and assembling streams into the same."""

from __future__ import annotations

import base64
import copy
import io
from typing import Any

import numpy as np
import pytest

from agl_runtime.calls import VersionSpan
from agl_runtime.gateway.capture import (
    StreamAssembler,
    forget_tokens,
    is_terminal,
    read_answer,
    read_experts,
    read_ids,
    read_logprobs,
    read_spans,
)
from agl_runtime.gateway.dialects.chat import ChatDialect
from agl_runtime.gateway.internal import ServerFailed
from agl_runtime.schemas import PolicyVersion
from fakes.model_server import Answer, chat_chunks, text_chunks, tool_call, whole_answer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True, "logprobs": True}
TEXT = {"prompt": "hi", "return_token_ids": True, "logprobs": 1}
SPANS = [{"version": "1.2", "start": 0, "end": 5}, {"version": "1.3", "start": 5, "end": 9}]


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    assembler = StreamAssembler()
    for chunk in chunks:
        assembler.feed(chunk)
    return assembler.response()


def test_a_text_that_becomes_a_list_is_replaced() -> None:
    chunks = [{"choices": [{"index": 0, "delta": {"content": content}}]} for content in ("a", [None], ["b"])]
    assert assembled(chunks)["choices"][0]["message"]["content"] == [None, "b"]


class Uncopied(str):
    """A text that must not be added to another: adding each piece to a long text would cost its square."""

    def __add__(self, _: str) -> str:
        raise AssertionError("a piece was added to a text")

    __radd__ = __add__


def test_pieces_of_a_text_are_joined_once() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": Uncopied("a")}}
    delta = {"content": Uncopied("x"), "reasoning_content": Uncopied("y"), "tool_calls": [call]}
    told = assembled([{"choices": [{"index": 0, "delta": delta, "text": Uncopied("z")}]}] * 3)["choices"][0]
    assert (told["text"], told["message"]["content"], told["message"]["reasoning_content"]) == ("zzz", "xxx", "yyy")
    assert told["message"]["tool_calls"] == [{"id": "c", "function": {"name": "fff", "arguments": "aaa"}}]


def test_letting_go_of_what_was_read_takes_nothing_from_the_harness_that_asked_for_it() -> None:
    answer = read_answer(whole_answer("chat/completions", CHAT, Answer("hello there"), "policy"))
    rendered = ChatDialect().render(ChatDialect().parse(CHAT), answer)
    before = copy.deepcopy(rendered)
    forget_tokens(answer.response)
    assert rendered == before
    assert rendered["choices"][0]["token_ids"] == answer.sampled_ids.tolist()
    assert not {"prompt_token_ids", "token_ids", "logprobs"} & {*answer.response, *answer.response["choices"][0]}


@pytest.mark.parametrize(
    "answer",
    [
        Answer("hello there"),
        Answer("", tool_calls=[tool_call("add", {"a": 1}, "c1"), tool_call("sub", {"b": 22}, "c2")]),
        Answer("both", tool_calls=[tool_call("add", {}, "c1")], reasoning="first I think"),
        Answer("", finish_reason="length"),
    ],
)
def test_a_streamed_chat_answer_is_assembled_into_the_whole_one(answer: Answer) -> None:
    whole = whole_answer("chat/completions", CHAT, answer, "policy")
    stream = assembled([*chat_chunks(whole), {"choices": [], "usage": whole["usage"]}])
    assert stream["choices"][0]["message"] == {**whole["choices"][0]["message"], "content": answer.text or ""}
    left, right = read_answer(stream), read_answer(whole)
    assert left.tool_calls == right.tool_calls
    assert (left.finish_reason, left.usage, left.model) == (right.finish_reason, right.usage, right.model)
    assert np.array_equal(left.prompt_ids, right.prompt_ids)
    assert np.array_equal(left.sampled_ids, right.sampled_ids)
    assert np.array_equal(left.logprobs, right.logprobs)


def test_of_log_probabilities_that_no_harness_asked_for_only_the_numbers_are_kept() -> None:
    whole = whole_answer("chat/completions", CHAT, Answer("hello there"), "policy")
    chunks = chat_chunks(whole)
    odd = {"choices": [{"index": 0, "delta": {}, "logprobs": {"content": [{"token": "x"}, None, {"logprob": None}]}}]}
    kept, numbers = StreamAssembler(), StreamAssembler(keeps_logprobs=False)
    for chunk in [*chunks, odd]:
        kept.feed(copy.deepcopy(chunk))
        numbers.feed(chunk)
    left, right = read_answer(kept.response()), read_answer(numbers.response())
    assert left.logprobs.size == left.sampled_ids.size + 3
    np.testing.assert_array_equal(left.logprobs, right.logprobs)
    assert not any(isinstance(item, dict) for item in right.response["choices"][0]["logprobs"]["content"])


@pytest.mark.parametrize("missing", ["", None])
def test_calls_without_an_id_get_one_in_the_answer_and_in_the_chunks(missing: Any) -> None:
    calls = [tool_call("add", {"a": 1}, missing), tool_call("sub", {}, "c2"), tool_call("add", {}, missing)]
    whole = whole_answer("chat/completions", {**CHAT, "n": 2}, Answer("", tool_calls=calls), "policy")
    chunks = copy.deepcopy(list(chat_chunks(whole)))
    assembler = StreamAssembler("x")
    for chunk in chunks:
        assembler.feed(chunk)
    streamed, read = read_answer(assembler.response(), "x"), read_answer(copy.deepcopy(whole), "x")
    assert streamed.tool_calls == read.tool_calls == {"call_x_0_0": '{"a": 1}', "c2": "{}", "call_x_0_2": "{}"}
    deltas = [row["delta"].get("tool_calls") or [] for chunk in chunks for row in chunk["choices"]]
    named = [call["id"] for calls in deltas for call in calls if call.get("id")]
    assert named == ["call_x_0_0", "c2", "call_x_0_2", "call_x_1_0", "c2", "call_x_1_2"]


def test_a_streamed_completion_is_assembled_into_the_whole_one() -> None:
    whole = whole_answer("completions", TEXT, Answer("continued", versions=SPANS), "policy")
    left, right = read_answer(assembled(list(text_chunks(whole)))), read_answer(whole)
    assert left.response["choices"][0]["text"] == "continued"
    assert np.array_equal(left.prompt_ids, right.prompt_ids)
    assert np.array_equal(left.sampled_ids, right.sampled_ids)
    assert np.array_equal(left.logprobs, right.logprobs)


def test_ids_of_a_chunk_with_an_empty_delta_count() -> None:
    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]},
        {"choices": [{"index": 0, "delta": {}, "token_ids": [7], "logprobs": {"content": [{"logprob": -1.0}]}}]},
        {"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [8], "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "token_ids": [9], "finish_reason": "stop"}]},
    ]
    answer = read_answer(assembled(chunks))
    assert answer.sampled_ids.tolist() == [7, 8, 9]


def test_choices_of_one_stream_are_kept_apart() -> None:
    whole = whole_answer("chat/completions", {**CHAT, "n": 2}, Answer("twice"), "policy")
    answer = read_answer(assembled(list(chat_chunks(whole))))
    assert answer.choices == 2
    assert [choice["message"]["content"] for choice in answer.response["choices"]] == ["twice", "twice"]


@pytest.mark.parametrize("body", [None, [], {}, {"choices": []}, {"choices": [1]}, {"choices": [{"index": 0}]}])
def test_what_holds_no_choices_is_an_upstream_error(body: Any) -> None:
    with pytest.raises(ServerFailed, match="holds no choices"):
        read_answer(body)


@pytest.mark.parametrize("chunk", [{}, {"choices": None}, {"choices": [3]}])
def test_a_chunk_without_choices_is_an_upstream_error(chunk: dict[str, Any]) -> None:
    with pytest.raises(ServerFailed, match="stream holds no choices"):
        StreamAssembler().feed(chunk)


@pytest.mark.parametrize(
    "value", [None, [], "12", 7, [1, "2"], [1.0], [True], [-1], [2**31], [2**70], [[1, 2]], [[1], [2, 3]]]
)
def test_what_are_no_token_ids_is_empty(value: Any) -> None:
    assert read_ids(value).size == 0


def test_token_ids_are_int32() -> None:
    ids = read_ids([0, 2**31 - 1])
    assert ids.dtype == np.int32


def test_logprobs_of_both_forms_are_read_and_a_null_is_not_a_number() -> None:
    chat = read_logprobs({"content": [{"logprob": -0.5}, {"logprob": None}]})
    text = read_logprobs({"token_logprobs": [-0.5, None]})
    assert np.array_equal(chat, text, equal_nan=True)
    assert chat.dtype == np.float32
    assert read_logprobs(None).size == 0
    assert read_logprobs({"content": None, "token_logprobs": []}).size == 0


def test_spans_that_cover_all_sampled_tokens_are_read() -> None:
    assert read_spans(SPANS, 9) == (
        VersionSpan(0, 5, PolicyVersion(1, 2)),
        VersionSpan(5, 9, PolicyVersion(1, 3)),
    )
    assert read_spans(None, 9) is None


@pytest.mark.parametrize(
    "value",
    [
        SPANS[:1],
        SPANS[1:],
        [*SPANS, SPANS[1]],
        [{"version": "1", "start": 0, "end": 9}],
        [{"start": 0, "end": 9}],
        [{"version": "1.1", "start": 0, "end": None}],
        ["1.1"],
        7,
    ],
)
def test_spans_that_do_not_cover_them_are_empty(value: Any) -> None:
    assert read_spans(value, 9) == ()


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        ({"choices": [{"delta": {"content": "x"}}]}, False),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}]}, True),
        ({"choices": [], "usage": {}}, True),
    ],
)
def test_a_terminal_chunk_finishes_a_choice_or_follows_one(chunk: dict[str, Any], expected: bool) -> None:
    assert is_terminal(chunk) is expected


def test_an_aborted_answer_has_no_finish_reason() -> None:
    whole = whole_answer("chat/completions", CHAT, Answer("part", finish_reason="abort"), "policy")
    assert read_answer(whole).finish_reason is None


def test_an_id_that_later_pieces_leave_empty_stays() -> None:
    assembler = StreamAssembler()
    for piece in (
        {"id": "c1", "function": {"name": "f", "arguments": "{"}},
        {"id": "", "function": {"arguments": "}"}},
    ):
        assembler.feed({"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **piece}]}}]})
    assert read_answer(assembler.response()).tool_calls == {"c1": "{}"}


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(("most", "kept"), [(9, np.uint8), (255, np.uint8), (256, np.int16)])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, ">i4"])
def test_routed_experts_are_read_and_kept_small(dtype: Any, most: int, kept: Any) -> None:
    told = np.arange(12).reshape(3, 2, 2)
    told[-1, -1, -1] = most
    experts = read_experts(npy(told.astype(dtype)), 3)
    assert experts is not None
    assert (experts.tolist(), experts.dtype) == (told.tolist(), kept)


ROUTED = np.zeros((3, 2, 2), np.uint8)


def with_head(head: str, version: int = 1) -> str:
    """A .npy file of 12 zeros whose head is `head`."""
    size_bytes = len(head).to_bytes(2 if version == 1 else 4, "little")
    return base64.b64encode(b"\x93NUMPY" + bytes([version, 0]) + size_bytes + head.encode() + bytes(12)).decode()


def head(shape: str = "(3, 2, 2)", dtype: str = "'|u1'") -> str:
    return f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n"


def test_a_file_that_is_made_by_hand_is_read() -> None:
    assert read_experts(with_head(head()), 3) is not None


@pytest.mark.parametrize(
    "value",
    [with_head(head(), 2), with_head(head(), 3), with_head(head("(3, 9, 9)")), with_head(head(f"(3, {10**30}, 2)")),
     with_head(head("(3, 999999999, 999999999)")), with_head(head("(3, -1, 2)")), with_head(head(dtype="'|O'")),
     with_head(head(dtype="','")), with_head("("), with_head("-" * 9000 + "1"), with_head("  x\n y\n")],
)  # fmt: skip
def test_a_head_that_lies_is_not_believed_and_fails_no_call(value: str) -> None:
    assert read_experts(value, 3) is None


@pytest.mark.parametrize(
    "value",
    [None, 7, "", "?", "AAAA", npy(ROUTED)[:-8], npy(ROUTED[:2]), npy(ROUTED[0]), npy(np.asfortranarray(ROUTED)),
     npy(ROUTED - 0.5), npy(ROUTED.astype(np.int16) - 1), npy(ROUTED.astype(np.int32) + 2**15), npy(ROUTED[:, :0])],
)  # fmt: skip
def test_experts_that_cannot_be_right_are_none(value: Any) -> None:
    assert read_experts(value, 3) is None
