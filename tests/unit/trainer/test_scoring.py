from __future__ import annotations

import pytest

from agl_runtime.trainer.backends.base import BatchTotals
from agl_runtime.trainer.scoring import NO_SPREAD, Candidate, score
from fakes.trained import make_samples


def group(name: str, *rewards: float | None, samples: int = 1, untrained: str | None = None) -> list[Candidate]:
    return [
        Candidate(
            name,
            reward,
            make_samples(f"{name}-{n}", samples, untrained=untrained),
            None if reward is not None else "lost",
        )
        for n, reward in enumerate(rewards)
    ]


def test_a_group_with_spread_gives_each_of_its_rollouts_its_advantage() -> None:
    scores = score(group("g", 1.0, 0.0, 0.0, 1.0), "dr_grpo")
    assert [item.advantage for item in scores.rollouts] == [0.5, -0.5, -0.5, 0.5]
    assert [item.group_id for item in scores.rollouts] == ["g"] * 4
    assert scores.skipped is None


def test_a_group_without_spread_is_not_computed_and_still_counts_in_the_totals() -> None:
    scores = score(group("a", 1.0, 0.0) + group("b", 1.0, 1.0), "grpo")
    assert [item.group_id for item in scores.rollouts] == ["a", "a"]
    assert scores.totals == BatchTotals(rollouts=4, samples=4, tokens=12)
    assert (scores.groups, scores.groups_without_spread) == (2, 1)


def test_a_rollout_without_a_reward_is_left_out_of_its_groups_baseline_and_of_the_totals() -> None:
    scores = score(group("a", 1.0, None, 0.0), "dr_grpo")
    assert [(item.samples.rollout_id, item.advantage) for item in scores.rollouts] == [("a-0", 0.5), ("a-2", -0.5)]
    assert scores.totals.rollouts == 2


@pytest.mark.parametrize("rewards", [(None, 1.0, None), (None, None, None)])
def test_a_group_with_fewer_than_two_rewards_gives_no_gradient(rewards: tuple[float | None, ...]) -> None:
    scores = score(group("a", 1.0, 0.0) + group("b", *rewards), "grpo")
    assert {item.group_id for item in scores.rollouts} == {"a"}
    assert (scores.groups, scores.groups_without_spread) == (2, 1)


def test_advantages_do_not_depend_on_how_many_samples_a_rollout_has() -> None:
    few, many = (score(group("a", 1.0, 0.0, samples=count), "grpo") for count in (1, 3))
    assert [item.advantage for item in few.rollouts] == [item.advantage for item in many.rollouts]
    assert many.totals == BatchTotals(rollouts=2, samples=6, tokens=18)


def test_a_rollout_with_nothing_to_train_on_weighs_in_the_baseline_and_is_not_computed() -> None:
    scores = score(group("a", 1.0) + group("a", 0.0, samples=0, untrained="no_logprobs"), "dr_grpo")
    assert [item.advantage for item in scores.rollouts] == [0.5]
    assert scores.report.untrained == {"no_logprobs": 1}


def test_a_batch_whose_rollouts_all_failed_is_skipped_with_the_commonest_reason() -> None:
    scores = score(group("a", None, None), "grpo")
    assert scores.rollouts == ()
    assert scores.totals == BatchTotals(0, 0, 0)
    assert scores.skipped == "all 2 rollouts ended without a reward, most often: lost"


def test_a_batch_without_any_spread_is_skipped() -> None:
    assert score(group("a", 1.0, 1.0) + group("b", 0.0, 0.0), "grpo").skipped == NO_SPREAD


def test_a_batch_without_any_trainable_call_is_skipped_with_the_commonest_reason() -> None:
    scores = score(group("a", 1.0, 0.0, samples=0, untrained="no_logprobs"), "grpo")
    assert scores.skipped == "no model call of a group whose rewards differ can be trained on: no_logprobs"
