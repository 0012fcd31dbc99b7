"""Whatever JSON a model server sends is an answer that can be kept, or a `ServerFailed`; nothing else is raised."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_runtime.calls import VersionSpan
from agl_runtime.gateway.capture import (
    StreamAssembler,
    is_terminal,
    read_answer,
    read_logprobs,
    read_partial,
    read_spans,
)
from agl_runtime.gateway.dialects.chat import ChatDialect
from agl_runtime.gateway.fidelity import Circumstances, judge
from agl_runtime.gateway.internal import ServerFailed
from agl_runtime.gateway.upstream import decode
from agl_runtime.schemas import Model, PolicyVersion

SETTINGS = settings(max_examples=150, deadline=None)
KEYS = ["message", "delta", "text", "content", "tool_calls", "index", "token_ids", "prompt_token_ids", "logprobs",
        "logprob", "token_logprobs", "weight_versions", "version", "start", "end", "finish_reason", "id"]  # fmt: skip
odd = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3)
odd |= st.sampled_from([10**400, -(10**40), 2**63, 2**64, 1e300, "\ud800", "1.1", "stop", f"{10**40}.1", "1.-1"])
values = st.recursive(
    odd,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=10,
)
rows = st.dictionaries(st.sampled_from(KEYS), values, max_size=6)
likely = st.fixed_dictionaries(
    {"message": rows, "finish_reason": st.just("stop")},
    optional={k: values for k in KEYS if k not in ("message", "finish_reason")},
)
tops = st.fixed_dictionaries(
    {"choices": st.lists(rows | likely, min_size=1, max_size=2)},
    optional={key: values for key in ("usage", "model", "id", "object", "prompt_token_ids")},
)
BEGUN = {"index": 0, "delta": {"content": "x"}}
REQUEST = ChatDialect().parse({"messages": [{"role": "user", "content": "x"}]})
SERVER = Model(model="policy", endpoint="http://m/v1")


def check_kept(answer: Any) -> None:
    assert orjson.dumps(answer.response)
    assert orjson.dumps(answer.usage)
    verdict = judge(answer, Circumstances("train", "policy", SERVER, SERVER, False, ()))
    assert all(0 <= number < 2**31 for span in verdict.spans for number in (span.start, span.end, *span.version))
    rendered = ChatDialect().render(REQUEST, answer)
    assert ChatDialect().replay(REQUEST, rendered).endswith(b"[DONE]\n\n")


@SETTINGS
@given(answer=tops)
def test_any_whole_answer(answer: Any) -> None:
    with contextlib.suppress(ServerFailed):
        check_kept(read_answer(decode(json.dumps(answer).encode())))


@SETTINGS
@given(chunks=st.lists(tops, min_size=1, max_size=3))
def test_any_stream(chunks: list[Any]) -> None:
    assembler, events = StreamAssembler(), ChatDialect().stream(REQUEST)
    with contextlib.suppress(ServerFailed):
        for chunk in [{"choices": [BEGUN]}, *chunks]:
            read = decode(json.dumps(chunk).encode())
            assembler.feed(read)
            is_terminal(read)
            events.feed(read)
        check_kept(read_answer(assembler.response()))
    check_kept(read_partial(assembler.response()))


@pytest.mark.parametrize("message", [["a"], "text", 7])
def test_a_message_that_is_no_object_is_an_upstream_error(message: Any) -> None:
    with pytest.raises(ServerFailed, match="holds no choices"):
        read_answer({"choices": [{"text": "x", "message": message}]})
    with pytest.raises(ServerFailed, match="stream holds no choices"):
        StreamAssembler().feed({"choices": [{"message": message}]})


@pytest.mark.parametrize("text", ["1" * 400, '"\\ud800"', "[" * 300 + "]" * 300])
def test_an_answer_that_could_not_be_told_again_is_an_upstream_error(text: str) -> None:
    with pytest.raises(ServerFailed, match="cannot be told again"):
        decode(b'{"a": ' + text.encode() + b"}")


def test_a_number_beyond_all_floats_is_no_logprob() -> None:
    assert str(read_logprobs({"token_logprobs": [10**400, -1.0]}).tolist()) == "[nan, -1.0]"


@pytest.mark.parametrize(
    "row",
    [
        {"version": f"{10**40}.1", "start": 0, "end": 2},
        {"version": "1.-1", "start": 0, "end": 2},
        {"version": f"1.{2**31}", "start": 0, "end": 2},
        {"version": "1.1", "start": False, "end": 2},
        {"version": "1.1", "start": 0.0, "end": 2.0},
    ],
)
def test_a_span_of_no_version_that_can_be_is_not_read(row: Any) -> None:
    assert read_spans([row], 2) == ()
    assert read_spans([{"version": "1.1", "start": 0, "end": 2}], 2) == (VersionSpan(0, 2, PolicyVersion(1, 1)),)
