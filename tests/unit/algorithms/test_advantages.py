from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.algorithms.advantages import Advantages, Algorithm, group_advantages
from agl_runtime.errors import TrainerError

ALGORITHMS: list[Algorithm] = ["grpo", "dr_grpo", "rloo"]
REWARDS = st.floats(-1e6, 1e6, allow_nan=False)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("grpo", [-0.5 / (math.sqrt(1 / 3) + 1e-6), -0.5 / (math.sqrt(1 / 3) + 1e-6)]),
        ("dr_grpo", [-0.5, -0.5]),
        ("rloo", [-2 / 3, -2 / 3]),
    ],
)
def test_known_values(algorithm: Algorithm, expected: list[float]):
    values = group_advantages([0.0, 0.0, 1.0, 1.0], ["g"] * 4, algorithm).values
    assert values == pytest.approx([*expected, *(-e for e in expected)], rel=1e-12)


def test_grpo_divides_by_the_sample_standard_deviation():
    rewards = [0.1, 0.7, 0.2, 0.9, 0.4]
    m, s = statistics.mean(rewards), statistics.stdev(rewards)
    assert group_advantages(rewards, [0] * 5, "grpo").values == pytest.approx([(r - m) / (s + 1e-6) for r in rewards])


def test_rloo_takes_the_mean_of_the_others_as_baseline():
    rewards = [3.0, 5.0, 10.0]
    assert group_advantages(rewards, [0] * 3, "rloo").values == pytest.approx([3 - 7.5, 5 - 6.5, 10 - 4.0])


def test_groups_are_compared_within_themselves_in_whatever_order_they_come():
    result = group_advantages([1.0, 5.0, 0.0, 7.0], ["a", "b", "a", "b"], "dr_grpo")
    assert result == Advantages((0.5, -1.0, -0.5, 1.0), (True,) * 4, 2, 0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_groups_without_spread_are_zero_and_counted(algorithm: Algorithm):
    result = group_advantages([1.0, 1.0, 0.0, 1.0, 4.0], ["a", "a", "b", "b", "alone"], algorithm)
    assert result.values[:2] == (0.0, 0.0)
    assert result.values[4] == 0.0
    assert result.has_spread == (False, False, True, True, False)
    assert (result.groups, result.groups_without_spread) == (3, 2)


def test_rounding_noise_is_no_spread():
    assert group_advantages([0.1 + 0.2, 0.3], ["a", "a"], "grpo").groups_without_spread == 1


def test_no_rollouts_give_no_advantages():
    assert group_advantages([], [], "grpo") == Advantages((), (), 0, 0)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_group(reward: float):
    with pytest.raises(
        TrainerError, match=r"^A reward of group g7 is not finite\. Return finite numbers as rewards\.$"
    ):
        group_advantages([0.0, reward], ["g7", "g7"], "grpo")


@given(st.lists(REWARDS, min_size=1, max_size=8), st.sampled_from(ALGORITHMS))
def test_advantages_are_finite_and_sum_to_nothing_in_a_group(rewards: list[float], algorithm: Algorithm):
    values = group_advantages(rewards, ["g"] * len(rewards), algorithm).values
    assert all(map(math.isfinite, values))
    assert abs(math.fsum(values)) <= 1e-9 * max(1.0, math.fsum(map(abs, values)))


@given(st.lists(st.tuples(REWARDS, st.sampled_from("ab")), max_size=9), st.randoms(use_true_random=False))
def test_the_order_of_the_rollouts_does_not_matter(rows: list[tuple[float, str]], rng: random.Random):
    order = list(range(len(rows)))
    rng.shuffle(order)
    plain = group_advantages([r for r, _ in rows], [g for _, g in rows], "grpo")
    mixed = group_advantages([rows[i][0] for i in order], [rows[i][1] for i in order], "grpo")
    assert [plain.values[i] for i in order] == pytest.approx(list(mixed.values), rel=1e-12, abs=1e-12)
    assert plain.groups_without_spread == mixed.groups_without_spread


@given(st.lists(REWARDS, min_size=2, max_size=8), st.sampled_from(ALGORITHMS))
def test_a_better_reward_never_has_a_smaller_advantage(rewards: list[float], algorithm: Algorithm):
    values = group_advantages(rewards, ["g"] * len(rewards), algorithm).values
    ranked = [value for _, value in sorted(zip(rewards, values, strict=True))]
    assert ranked == sorted(ranked)
