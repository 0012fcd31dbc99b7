"""Model calls as v1.0's events, and events trimmed to triplets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agl_runtime.calls import CallInfo, PackedCall, VersionSpan, make_delta
from agl_runtime.gateway.events_view import call_events, merged, triplets
from agl_runtime.schemas import Event, Model, PolicyVersion
from agl_runtime.store.base import StoredCall

CHOICE: dict[str, Any] = {"index": 0, "message": {"content": "x"}, "logprobs": None, "finish_reason": "stop"}


def stored(call_id: str, prompt: list[int], sampled: list[int], **changes: Any) -> StoredCall:
    info = CallInfo(call_id, "r1", "0", 0, "chat", True, changes.pop("commit_seq", 0), http_status=200)
    base, keep = changes.pop("base", (None, 0))
    packed = PackedCall(
        info,
        make_delta(np.array(prompt, np.int32), base, keep),
        np.array(sampled, np.int32),
        np.full(len(sampled), -0.5, np.float32),
        (VersionSpan(0, len(sampled), PolicyVersion(2, 7)),),
    )
    fields: dict[str, Any] = {
        "created_at": 10.0,
        "request": {"messages": []},
        "response": {"id": "a", "choices": [CHOICE]},
        "packed": packed,
        "upstream": Model(model="policy", endpoint="http://m/v1", version=7, run_epoch=2),
        "latency_ms": 500.0,
        "retry_count": 1,
        "usage": {"prompt_tokens": len(prompt)},
    }
    return StoredCall(info=info, **(fields | changes))


def event(kind: str, at: float, **data: Any) -> Event:
    return Event(event_type=kind, rollout_id="r1", attempt_id="0", timestamp=at, data=data)


def test_a_call_is_shown_as_a_model_request_with_its_tokens() -> None:
    (shown,) = call_events([stored("c1", [1, 2], [3, 4])])
    assert (shown.event_type, shown.timestamp) == ("model_request", 10.5)
    data = shown.data
    assert data["server"] == {"model": "policy", "endpoint": "http://m/v1", "version": 7}
    assert (data["http_status"], data["status"], data["retry_count"]) == (200, "ok", 1)
    assert (data["call_id"], data["dialect"]) == ("c1", "chat")
    assert data["response"]["prompt_token_ids"] == [1, 2]
    choice = data["response"]["choices"][0]
    assert choice["token_ids"] == [3, 4]
    assert choice["logprobs"] == {"content": [{"logprob": -0.5}, {"logprob": -0.5}]}


def test_answers_keep_their_order_whatever_their_times_say() -> None:
    late = stored("first", [1], [2], commit_seq=0, created_at=10.0, latency_ms=900.0)
    soon = stored("second", [1, 2], [3], commit_seq=1, created_at=10.5, latency_ms=100.0)
    shown = merged([event("custom", 10.7)], call_events([soon, late]))
    assert [item.data.get("call_id") for item in shown] == [None, "first", "second"]
    assert [item.timestamp for item in shown] == [10.7, 10.9, 10.9]


def test_logprobs_that_the_harness_asked_for_stay_as_they_were() -> None:
    own = {"content": [{"token": "x", "logprob": -0.5}]}
    (shown,) = call_events([stored("c1", [1], [3], response={"choices": [{**CHOICE, "logprobs": own}]})])
    assert shown.data["response"]["choices"][0]["logprobs"] == own


def test_an_uncommitted_call_is_no_event() -> None:
    assert call_events([stored("c1", [1], [2], packed=None, response=None)]) == []


def test_prompts_are_rebuilt_whatever_the_order_of_start() -> None:
    first = stored("c1", [1, 2], [3], commit_seq=0)
    second = stored("c2", [1, 2, 3, 9], [5], commit_seq=1, base=("c1", 3))
    shown = call_events([second, first])
    assert [e.data["response"]["prompt_token_ids"] for e in shown] == [[1, 2], [1, 2, 3, 9]]


def test_the_version_shown_is_the_oldest_of_the_tokens() -> None:
    spans = (VersionSpan(0, 1, PolicyVersion(2, 4)), VersionSpan(1, 2, PolicyVersion(2, 5)))
    call = stored("c1", [1], [2, 3])
    assert call.packed is not None
    packed = PackedCall(call.info, call.packed.prompt, call.packed.sampled_ids, call.packed.logprobs, spans)
    (shown,) = call_events([stored("c1", [1], [2, 3], packed=packed)])
    assert shown.data["server"]["version"] == 4


def test_events_are_merged_in_order_of_time() -> None:
    events = merged([event("a", 1), event("c", 3)], [event("b", 2)])
    assert [e.event_type for e in events] == ["a", "b", "c"]


def test_a_triplet_holds_what_training_needs() -> None:
    (shown,) = triplets(call_events([stored("c1", [1, 2], [3, 4])]))
    assert shown.data == {
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3, 4],
        "response_log_probs": [-0.5, -0.5],
        "server": {"model": "policy", "version": 7},
        "http_status": 200,
        "status": "ok",
    }


def test_a_failed_call_keeps_its_error_as_a_triplet() -> None:
    failed = stored("c1", [], [], response={"error": {"message": "m"}})
    (shown,) = triplets(call_events([failed]))
    assert shown.data["error"] == {"message": "m"}
    assert shown.data["prompt_token_ids"] == []


def test_of_equal_prompts_the_last_call_counts_and_empty_ones_all_stay() -> None:
    calls = [stored("c1", [1], [2]), stored("c2", [], []), stored("c3", [1], [9]), stored("c4", [], [])]
    shown = triplets([*call_events(calls), event("note", 99)])
    assert [e.data.get("response_token_ids") for e in shown] == [[], [9], [], None]


def test_a_reward_keeps_value_source_and_reason() -> None:
    (shown,) = triplets([event("reward", 1, value=0.5, source="agent", reason="r", parts={"a": 1})])
    assert shown.data == {"value": 0.5, "source": "agent", "reason": "r"}


@pytest.mark.parametrize(
    "response", [None, [], {"choices": []}, {"choices": 5}, {"prompt_token_ids": "x", "choices": [7]}]
)
def test_a_posted_model_request_of_any_shape_is_trimmed_without_failing(response: Any) -> None:
    (shown,) = triplets([event("model_request", 1, response=response)])
    assert shown.data["response_log_probs"] is None
