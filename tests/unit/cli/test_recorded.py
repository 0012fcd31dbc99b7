from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from agl_cli.recorded import Filter, Recorded, as_json, message_lines, raw_row, sft_rows
from agl_cli.reference import JSON_KEYS
from agl_runtime.samples.build import build_samples
from agl_runtime.samples.types import Limits
from agl_runtime.schemas import Event, Rollout, RolloutConfig, RolloutMetadata, RolloutState, RolloutStatus
from fakes.trained import make_call, make_calls

TOOL = {"type": "function", "function": {"name": "calculator"}}
ASKED = {"role": "user", "content": "2+2?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "calculator", "arguments": "2+2"}}],
}


def rollout(is_train: bool = True, **metadata: Any) -> Rollout:
    status = RolloutStatus(state=RolloutState.SUCCEEDED, created_at=0.0, updated_at=0.0)
    extra = RolloutMetadata.model_validate(metadata)
    return Rollout(
        rollout_id="r", input={"q": 1}, is_train=is_train, config=RolloutConfig(), metadata=extra, status=status
    )


def event(event_type: str, **data: Any) -> Event:
    return Event(event_type=event_type, rollout_id="r", attempt_id="0", timestamp=0.0, data=data)


def request(call_id: str, messages: list[Any], answer: dict[str, Any], **body: Any) -> Event:
    response = {"choices": [{"message": answer}]}
    asked = {"messages": messages, **body}
    return event("model_request", call_id=call_id, dialect="chat", request=asked, response=response)


def recorded(*events: Event, reasons: tuple[str | None, ...] = (None,), reward: float | None = 1.0) -> Recorded:
    made = make_calls("r", reward, *(make_call("r", f"c{n}", reason=reason) for n, reason in enumerate(reasons)))
    return Recorded(
        rollout(step=2, task_id="t"), ("0",), events, made, build_samples(made, Limits(100, 100))
    )  # fmt: skip


def test_filters_look_at_mode_and_step() -> None:
    assert rollout(step=2) in Filter()
    assert rollout(step=2) in Filter(mode="train", step=2)
    assert rollout(step=2) not in Filter(step=3)
    assert rollout(is_train=False) not in Filter(mode="train")


def test_a_rollout_is_told_with_calls_samples_and_outcome() -> None:
    item = recorded(
        event("agent_exit", exit_code=0, cpu_s=0.5),
        request("c0", [ASKED], {"role": "assistant", "content": "4"}),
        event("reward", value=1.0, parts={"style": 0.5}),
    )
    found = as_json(item)
    assert list(found) == list(JSON_KEYS["agl rollouts show"])
    assert (found["reward"], found["reward_parts"], found["agent"]) == (
        1.0,
        {"style": 0.5},
        {"exit_code": 0, "cpu_s": 0.5},
    )
    (call,), (sample,) = found["calls"], found["samples"]
    assert (call["trainable"], call["versions"], call["sampled_tokens"]) == (True, ["1.0"], 3)
    about = {"calls": ["c0"], "split": None, "truncated": False, "broke": None}
    assert sample == {"tokens": 5, "trained_tokens": 3, **about}
    assert found["conversations"] == [[ASKED, {"role": "assistant", "content": "4"}]]
    json.dumps(found)


def test_a_call_that_cannot_be_trained_on_keeps_its_reason_and_conversation() -> None:
    item = recorded(request("c0", [ASKED], {"role": "assistant", "content": "4"}), reasons=("validation",))
    found = as_json(item)
    assert (found["samples"], found["report"]["untrained"]) == ([], {"validation": 1})
    assert len(found["conversations"]) == 1


def test_a_rollout_without_calls_has_no_conversation() -> None:
    found = as_json(recorded(reasons=(), reward=None))
    assert (found["reward"], found["calls"], found["conversations"]) == (None, [], [])


def test_supervised_rows_hold_messages_and_tools() -> None:
    item = recorded(request("c0", [ASKED], CALLED, tools=[TOOL]))
    (row,) = sft_rows(item)
    assert row == {"messages": [ASKED, CALLED], "tools": [TOOL]}


def test_raw_rows_hold_everything_of_the_last_attempt() -> None:
    item = recorded(event("reward", value=1.0))
    assert list(raw_row(item)) == ["rollout", "attempts", "reward", "events"]
    json.dumps(raw_row(item))


def test_a_completion_is_a_conversation_too() -> None:
    response = {"choices": [{"text": " upon"}]}
    call = event("model_request", call_id="c0", dialect="completions", request={"prompt": "Once"}, response=response)
    (found,) = as_json(recorded(call))["conversations"]
    assert found == [{"role": "prompt", "content": "Once"}, {"role": "assistant", "content": " upon"}]


RESPONSES = event(
    "model_request",
    call_id="c0",
    dialect="responses",
    request={"input": "2+2?", "tools": [{"type": "function", "name": "calculator"}]},
    response={"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}]},
)
MESSAGES = event(
    "model_request",
    call_id="c0",
    dialect="messages",
    request={"messages": [ASKED], "tools": [{"name": "calculator", "input_schema": {}}]},
    response={"content": [{"type": "text", "text": "4"}]},
)


@pytest.mark.parametrize("call", [RESPONSES, MESSAGES])
def test_conversations_are_told_and_exported_as_chat_whatever_the_harness_spoke(call: Event) -> None:
    item, expected = recorded(call), [ASKED, {"role": "assistant", "content": "4"}]
    assert as_json(item)["conversations"] == [expected]
    (row,) = sft_rows(item)
    assert row["messages"] == expected
    assert [(tool["type"], tool["function"]["name"]) for tool in row["tools"]] == [("function", "calculator")]


def test_instructions_have_the_role_under_which_the_model_got_them() -> None:
    item = recorded(request("c0", [{"role": "developer", "content": "Be brief."}, ASKED], CALLED))
    (found,) = as_json(item)["conversations"]
    assert found[0] == {"role": "system", "content": "Be brief."}


def test_a_call_without_an_answer_is_shown_and_no_supervised_row() -> None:
    failed = event("model_request", call_id="c0", dialect="chat", request={"messages": [ASKED]}, response={"error": {}})
    item = recorded(failed, reasons=("error",))
    assert as_json(item)["conversations"] == [[ASKED]]
    assert list(sft_rows(item)) == []


FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("4", "5"))
MORE = {"role": "user", "content": "And one?"}
TITLE = {"role": "user", "content": "Name this talk."}
NAMED = {"role": "assistant", "content": "Sums"}
OVERFLOW = "The model's context holds 8 tokens. Make the prompt shorter."


def talk(*asked: list[Any], kinds: str = "", failed: int | None = None, reason: str = "validation") -> Recorded:
    """A rollout without samples whose calls asked for these messages; of `kinds` a "t" is a side job (its answer is
    NAMED), any other main work (4, then 5). The call at `failed` got an error."""
    calls, events = [], []
    for n, messages in enumerate(asked):
        made, side = make_call("r", f"c{n}", reason=reason), kinds[n : n + 1] == "t"
        http_status = 400 if n == failed else 200
        info = replace(made.info, kind="auxiliary" if side else "main", http_status=http_status)
        calls.append(replace(made, info=info))
        asking = request(f"c{n}", messages, NAMED if side else FIVE if MORE in messages else FOUR)
        if n == failed:
            asking.data["response"] = {"error": {"message": f"{OVERFLOW}\nMore of it."}}
        events.append(asking)
    made_calls = make_calls("r", 1.0, *calls)
    return Recorded(rollout(), ("0",), tuple(events), made_calls, build_samples(made_calls, Limits(100, 100)))


def test_without_samples_the_main_conversation_is_told_and_exported_not_the_title_that_came_last() -> None:
    item = talk([ASKED], [ASKED, FOUR, MORE], [TITLE], kinds="mmt")
    assert as_json(item)["conversations"] == [[ASKED, FOUR, MORE, FIVE]]
    assert [row["messages"] for row in sft_rows(item)] == [[ASKED, FOUR, MORE, FIVE]]


def test_a_rollout_of_nothing_but_side_jobs_is_told_and_not_exported() -> None:
    item = talk([TITLE], kinds="t", reason="auxiliary")
    assert as_json(item)["conversations"] == [[TITLE, NAMED]]
    assert list(sft_rows(item)) == []


def test_without_samples_each_main_conversation_is_told() -> None:
    item = talk([ASKED], [MORE], [ASKED])
    assert as_json(item)["conversations"] == [[ASKED, FOUR], [MORE, FIVE], [ASKED, FOUR]]


def test_a_last_call_that_failed_does_not_hide_the_conversation_and_its_error_is_told() -> None:
    item = talk([ASKED], [ASKED, FOUR, MORE], failed=1)
    found = as_json(item)
    assert found["conversations"] == [[ASKED, FOUR]]
    assert [call["error"] for call in found["calls"]] == [None, OVERFLOW]
    assert [row["messages"] for row in sft_rows(item)] == [[ASKED, FOUR]]


def test_messages_are_read_as_text_and_calls() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {}}]
    assert list(message_lines({"role": "user", "content": parts})) == ["user: look [image_url]"]
    assert list(message_lines(CALLED)) == ["assistant calls calculator(2+2)"]
    (line,) = message_lines({"role": "tool", "content": "x" * 3000})
    assert line.endswith("… (1000 more characters)")
