from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.trainer.evaluation import evaluate, wilson


@pytest.mark.parametrize(
    ("passed", "n", "low", "high"),
    # Reference values: Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_intervals(passed: int, n: int, low: float, high: float) -> None:
    assert wilson(passed / n, n) == pytest.approx((low, high), abs=5e-5)


def test_one_rollout_a_task_gives_the_share_that_passed_and_wilsons_interval() -> None:
    result = evaluate({str(task): [1.0 if task < 32 else 0.5] for task in range(128)})
    assert result is not None
    assert result.pass_at_1 == 0.25
    assert (result.ci_low, result.ci_high) == wilson(0.25, 128)
    assert (result.reward_mean, result.tasks, result.rollouts) == (0.625, 128, 128)


def test_more_rollouts_a_task_give_the_normal_interval_over_tasks() -> None:
    result = evaluate({"a": [1.0, 1.0], "b": [1.0, 0.0], "c": [0.0, 0.0]})
    assert result is not None
    # shares 1, 1/2, 0: mean 1/2, sample standard deviation 1/2, half width 1.96 * 0.5 / sqrt(3)
    assert result.pass_at_1 == 0.5
    assert result.ci_high - 0.5 == pytest.approx(min(0.5, 1.959964 * 0.5 / 3**0.5))
    assert (result.tasks, result.rollouts) == (3, 6)


def test_a_task_weighs_the_same_whatever_number_of_its_rollouts_has_a_reward() -> None:
    result = evaluate({"a": [1.0], "b": [0.0, 0.0, 0.0]})
    assert result is not None
    assert result.pass_at_1 == 0.5
    assert result.reward_mean == 0.25


def test_tasks_that_all_agree_do_not_make_the_interval_vanish() -> None:
    result = evaluate({str(task): [1.0, 1.0] for task in range(10)})
    assert result is not None
    assert (result.ci_low, result.ci_high) == wilson(1.0, 10)
    assert result.ci_low < 0.8


def test_a_reward_just_below_one_by_rounding_passes_and_a_lower_one_does_not() -> None:
    result = evaluate({"a": [1.0 - 1e-7], "b": [0.999]})
    assert result is not None
    assert result.pass_at_1 == 0.5


def test_tasks_without_a_reward_are_left_out_and_without_any_there_is_no_result() -> None:
    result = evaluate({"a": [1.0], "b": []})
    assert result is not None
    assert (result.pass_at_1, result.tasks) == (1.0, 1)
    assert evaluate({"a": []}) is None


@given(st.dictionaries(st.text(max_size=3), st.lists(st.floats(-2, 2), min_size=1, max_size=4), min_size=1, max_size=9))
def test_the_interval_holds_the_estimate_and_stays_within_bounds(rewards: dict[str, list[float]]) -> None:
    result = evaluate(rewards)
    assert result is not None
    assert 0.0 <= result.ci_low <= result.pass_at_1 + 1e-12
    assert result.pass_at_1 - 1e-12 <= result.ci_high <= 1.0
