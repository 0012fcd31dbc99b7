from __future__ import annotations

from typing import Any

import pytest

from agl_runtime.gateway.dialects.reasoning import seal
from agl_runtime.gateway.dialects.responses_history import completed, continued, named
from agl_runtime.gateway.internal import CallRefused

ONE, TWO = "1" * 32, "2" * 32
USER = {"role": "user", "content": "go"}
THOUGHT = {"type": "reasoning", "id": f"rs_{ONE}", "content": [], "summary": []}
SAID = {"type": "message", "id": f"msg_{ONE}_2", "role": "assistant", "content": []}
CALLED = {"type": "function_call", "id": f"fc_{ONE}_0", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "1"}
RECORDED: dict[str, Any] = {
    f"resp_{ONE}": ({"input": [USER]}, {"output": [THOUGHT, SAID, CALLED]}),
    f"resp_{TWO}": ({"input": "go", "store": False}, {"output": [{**SAID, "id": f"msg_{TWO}"}]}),
}


def reference(name: Any) -> dict[str, Any]:
    return {"type": "item_reference", "id": name}


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"input": "go"}, set()),
        ({"input": [USER, SAID, CALLED]}, set()),
        ({"input": "go", "previous_response_id": None}, set()),
        ({"input": "go", "previous_response_id": "resp_x"}, {"resp_x"}),
        ({"input": [reference(f"rs_{ONE}"), {"id": f"fc_{TWO}_0"}, RESULT]}, {f"resp_{ONE}", f"resp_{TWO}"}),
        ({"input": [reference(f"msg_{ONE}_")], "previous_response_id": "resp_x"}, {f"msg_{ONE}_", "resp_x"}),
        ({"input": [reference(None), reference(5)]}, {"None", "5"}),
    ],
)
def test_a_request_names_the_responses_that_it_needs(body: dict[str, Any], names: set[str]) -> None:
    assert named(body) == names


def test_a_previous_response_brings_its_input_and_what_it_said() -> None:
    body = {"model": "m", "input": [RESULT], "previous_response_id": f"resp_{ONE}"}
    assert completed(body, RECORDED) == {**body, "input": [USER, THOUGHT, SAID, CALLED, RESULT]}
    assert completed({**body, "input": "more"}, RECORDED)["input"][-1] == {"role": "user", "content": "more"}
    assert body["input"] == [RESULT]


def test_items_that_are_only_named_stand_where_they_are_named() -> None:
    body = {"input": [USER, reference(f"rs_{ONE}"), {"id": f"fc_{ONE}_0"}, RESULT]}
    assert completed(body, RECORDED)["input"] == [USER, THOUGHT, CALLED, RESULT]


@pytest.mark.parametrize("name", ["resp_unknown", f"resp_{TWO}", f"msg_{ONE}_2"])
def test_a_response_that_was_not_made_here_or_not_to_be_stored_is_refused_as_by_the_api(name: str) -> None:
    with pytest.raises(CallRefused) as caught:
        completed({"input": "go", "previous_response_id": name}, RECORDED)
    refused = caught.value
    assert (refused.http_status, refused.code, refused.param) == (
        400,
        "previous_response_not_found",
        "previous_response_id",
    )
    assert refused.what == f"Previous response with id '{name}' not found."
    assert refused.fix == "Name what was answered in this attempt with `store` true, or send its items themselves."


@pytest.mark.parametrize("name", [f"msg_{TWO}", f"msg_{ONE}", "msg_1", None])
def test_an_item_that_was_not_said_here_or_not_to_be_stored_is_refused_as_by_the_api(name: Any) -> None:
    with pytest.raises(CallRefused) as caught:
        completed({"input": [reference(name)]}, RECORDED)
    assert (caught.value.http_status, caught.value.param) == (404, "input")
    assert caught.value.what == f"Item with id '{name}' not found."


def test_a_previous_response_must_be_a_text() -> None:
    with pytest.raises(CallRefused, match="`previous_response_id` must be a text"):
        named({"input": "go", "previous_response_id": 5})


def without_id(item: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**{key: value for key, value in item.items() if key != "id"}, **changes}


SEALED = without_id(THOUGHT, encrypted_content=seal(f"resp_{ONE}", "hm"))


@pytest.mark.parametrize(
    "items",
    [
        [USER, THOUGHT, SAID, CALLED, RESULT],
        [USER, {**SAID, "id": f"msg_{TWO}"}, USER, SAID, USER],
        [USER, without_id(SAID), CALLED, RESULT, USER],
        [USER, SEALED, without_id(SAID), USER],
        [CALLED, RESULT],
    ],
)
def test_the_last_answer_in_a_history_is_known_by_its_ids_or_its_seal(items: list[Any]) -> None:
    assert continued(items) == f"resp_{ONE}"


@pytest.mark.parametrize(
    "items",
    [
        [],
        [USER],
        [USER, SAID, USER, without_id(SAID), USER],
        [USER, SAID, {**CALLED, "id": f"fc_{TWO}_0"}, RESULT],
        [USER, {**SAID, "id": "msg_68af"}, USER],
        [USER, {**SAID, "id": ["odd"]}, {**THOUGHT, "id": None, "encrypted_content": 5}],
    ],
)
def test_a_history_that_names_no_single_answer_claims_none(items: list[Any]) -> None:
    assert continued(items) is None
