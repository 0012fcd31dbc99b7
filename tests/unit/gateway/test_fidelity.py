"""Which calls may be trained on, and the reason of every other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agl_runtime.calls import VersionSpan
from agl_runtime.gateway.fidelity import Circumstances, changed_params, judge
from agl_runtime.gateway.internal import Answer
from agl_runtime.schemas import Model, PolicyVersion

SERVER = Model(model="policy", endpoint="http://m/v1", version=3, run_epoch=1)
NONE = np.empty(0, np.int32)
SPAN = VersionSpan(0, 2, PolicyVersion(1, 3))


def answer(**changes: Any) -> Answer:
    whole = Answer(
        response={"choices": [{}]},
        prompt_ids=np.array([1, 2, 3], np.int32),
        sampled_ids=np.array([4, 5], np.int32),
        logprobs=np.array([-0.1, -0.2], np.float32),
        spans=None,
        finish_reason="stop",
        model="policy",
        usage={"prompt_tokens": 3, "completion_tokens": 2},
    )
    return replace(whole, **changes)


def around(**changes: Any) -> Circumstances:
    usual = Circumstances(
        mode="train", policy="policy", dispatched=SERVER, present=SERVER, auxiliary=False, changed_params=()
    )
    return replace(usual, **changes)


def test_a_complete_answer_of_one_version_is_trainable() -> None:
    verdict = judge(answer(), around())
    assert (verdict.trainable, verdict.reason, verdict.spans) == (True, None, (SPAN,))


def test_the_servers_own_spans_win_over_the_registered_version() -> None:
    own = (VersionSpan(0, 1, PolicyVersion(1, 3)), VersionSpan(1, 2, PolicyVersion(1, 4)))
    newer = SERVER.model_copy(update={"version": 4})
    assert judge(answer(spans=own), around(present=newer)).spans == own
    assert judge(answer(spans=own), around(present=newer)).trainable


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"finish_reason": None}, "cut"),
        ({"model": "other"}, "wrong_model"),
        ({"response": {"choices": [{}, {}]}}, "multiple_choices"),
        ({"prompt_ids": NONE}, "no_prompt_ids"),
        ({"sampled_ids": NONE}, "no_sampled_ids"),
        ({"sampled_ids": NONE, "usage": {"completion_tokens": 0}}, "empty_generation"),
        ({"usage": {"prompt_tokens": 4, "completion_tokens": 2}}, "ids_missing"),
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 3}}, "ids_missing"),
        ({"logprobs": NONE}, "no_logprobs"),
        ({"logprobs": np.array([-0.1], np.float32)}, "logprobs_length"),
        ({"logprobs": np.array([-0.1, np.nan], np.float32)}, "logprobs_not_finite"),
        ({"logprobs": np.array([-np.inf, -0.1], np.float32)}, "logprobs_not_finite"),
        ({"spans": ()}, "mixed_versions"),
    ],
)
def test_a_flaw_of_the_answer_has_its_reason(changes: dict[str, Any], reason: str) -> None:
    verdict = judge(answer(**changes), around())
    assert (verdict.trainable, verdict.reason) == (False, reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "val"}, "validation"),
        ({"policy": "another"}, "wrong_model"),
        ({"present": None}, "mixed_versions"),
        ({"present": SERVER.model_copy(update={"version": 4})}, "mixed_versions"),
        ({"present": SERVER.model_copy(update={"run_epoch": 2})}, "mixed_versions"),
        ({"changed_params": ("top_p",)}, "distribution_changed"),
        ({"auxiliary": True}, "auxiliary"),
        ({"auxiliary": True, "policy": "another"}, "auxiliary"),
    ],
)
def test_a_circumstance_has_its_reason(changes: dict[str, Any], reason: str) -> None:
    verdict = judge(answer(), around(**changes))
    assert (verdict.trainable, verdict.reason) == (False, reason)


def test_validation_is_named_before_the_logprobs_that_it_does_not_ask_for() -> None:
    assert judge(answer(logprobs=NONE), around(mode="val")).reason == "validation"


def test_a_missing_usage_is_no_flaw() -> None:
    assert judge(answer(usage={}), around()).trainable


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}},
        {"top_p": None, "response_format": {"type": "text"}, "tool_choice": "auto"},
        {"temperature": 0.1, "max_tokens": 5, "stop": ["x"], "seed": 1, "n": 2},
    ],
)
def test_neutral_parameters_change_nothing(body: dict[str, Any]) -> None:
    assert changed_params(body) == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 40),
        ("min_p", 0.05),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 10}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("guided_regex", "a+"),
        ("min_tokens", 5),
    ],
)
def test_a_parameter_that_changes_the_distribution_is_named(name: str, value: Any) -> None:
    assert changed_params({name: value}) == (name,)
