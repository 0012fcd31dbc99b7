from __future__ import annotations

from typing import Any

import pytest

from agl_runtime.gateway.parents import as_sampled, is_auxiliary, parent_of

ANSWERED = {"c1": ["call-a"], "c2": ["call-a"], "c3": ["call-b"], "again": ["call-a", "call-b"]}
USER = {"role": "user", "content": "go"}


def said(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id} for call_id in ids]}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "1"}


@pytest.mark.parametrize(
    ("messages", "parent"),
    [
        ([USER, said("c1"), result("c1")], "call-a"),
        ([USER, said("c1", "c2"), result("c2"), result("c1"), USER], "call-a"),
        ([USER, said("c1"), result("c1"), said("c3"), result("c3")], "call-b"),
        ([USER, said("c3", "again"), result("c3")], "call-b"),
    ],
)
def test_the_last_assistant_message_names_the_parent(messages: list[Any], parent: str) -> None:
    assert parent_of(messages, ANSWERED) == parent


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [USER],
        [USER, said("c1"), result("c1"), {"role": "assistant", "content": "text"}, USER],
        [USER, said("unknown"), result("unknown")],
        [USER, said("again"), result("again")],
        [USER, said("c1", "c3")],
        [USER, said("c1", "unknown")],
        ["text", 7, {"role": "assistant", "tool_calls": "odd"}, {"role": "assistant", "tool_calls": [{"id": 5}, None]}],
    ],
)
def test_where_ids_name_no_single_call_no_parent_is_claimed(messages: list[Any]) -> None:
    assert parent_of(messages, ANSWERED) is None


def test_a_foreign_model_is_auxiliary_only_where_the_policy_is_asked_for_by_name() -> None:
    assert is_auxiliary("small", "small", policy="policy", has_asked_policy=True)
    assert not is_auxiliary("small", "small", policy="policy", has_asked_policy=False)
    assert not is_auxiliary("policy", "policy", policy="policy", has_asked_policy=True)


def test_what_a_configured_name_means_decides_whatever_the_agent_asked_for_before() -> None:
    assert is_auxiliary("haiku", "side", policy="policy", has_asked_policy=False)
    assert not is_auxiliary("haiku", "policy", policy="policy", has_asked_policy=True)


def calling(arguments: Any, call_id: Any = "c1") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "function": function}]}


@pytest.mark.parametrize("written", ['{"b":1,"a":[true,"\u00e9"]}', '{"a": [true, "é"], "b": 1}'])
def test_arguments_that_a_harness_wrote_anew_go_on_as_they_were_sampled(written: str) -> None:
    sampled = '{"a": [true, "é"],  "b": 1.0}'
    assert as_sampled(calling(written), {"c1": sampled}) == calling(sampled)


@pytest.mark.parametrize(
    "message",
    [
        calling('{"a": [false, "é"], "b": 1}'),
        calling('{"a": [1, "é"], "b": 1}'),
        calling("no JSON"),
        calling('{"a":[true,"é"],"b":1}', "c2"),
        calling({"a": [True, "é"], "b": 1}),
        calling('{"a":[true,"é"],"b":1}', ["c1"]),
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [5, {"id": "c1"}]},
        {"role": "assistant", "tool_calls": "c1"},
        "no message",
    ],
)
def test_anything_else_in_a_message_stays_as_the_harness_wrote_it(message: Any) -> None:
    assert as_sampled(message, {"c1": '{"a": [true, "é"], "b": 1}'}) == message
