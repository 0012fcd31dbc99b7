"""What the arms of the ablation make of the same rollouts, and that what is measured of them is the update's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from agl_runtime.algorithms.batching import train_rows
from agl_runtime.config import TrainConfig
from agl_runtime.samples.types import BuildReport, RolloutSamples
from agl_runtime.trainer.backends.embedded.policy import load_policy
from agl_runtime.trainer.backends.embedded.update import Updater
from agl_runtime.trainer.scoring import Candidate, Scores, score
from fakes.rows import sample
from fakes.scored import scored_rollouts
from fakes.tiny_model import make_tiny_policy


@pytest.fixture
def arms(bench: Callable[[str], ModuleType]) -> Any:
    return bench("support.arms")


def candidate(name: str, reward: float, *trained: int) -> Candidate:
    """A rollout of one group with a sample of so many trained tokens for each of `trained`."""
    samples = tuple(sample([True] * count) for count in trained)
    return Candidate("g", reward, RolloutSamples(name, samples, BuildReport(len(trained), sum(trained), sum(trained))))


# One rollout that succeeds in a sample of 4 tokens, one that fails in three of 2.
GROUP = [candidate("good", 1.0, 4), candidate("bad", 0.0, 2, 2, 2)]


def terms(arms: ModuleType, name: str, algorithm: str = "dr_grpo") -> list[tuple[float, float]]:
    """Of each row: its advantage, and the weight of one of its tokens."""
    arm = next(arm for arm in arms.ARMS if arm.name == name)
    scores = arm.score(GROUP, algorithm)
    rows = train_rows(scores.rollouts, scores.totals, arm.normalization)
    return [(row.advantage, row.weight) for row in rows]


def test_by_sample_a_rollout_of_three_samples_is_three_members_of_its_group(arms: ModuleType) -> None:
    # Rewards 1, 0, 0, 0: mean 1/4. Ten tokens in all.
    assert terms(arms, "sample") == [pytest.approx(row) for row in [(0.75, 0.1), *[(-0.25, 0.1)] * 3]]


def test_by_sample_the_deviation_is_over_samples_too(arms: ModuleType) -> None:
    # Standard deviation of 1, 0, 0, 0 with divisor 3: 1/2.
    assert [row[0] for row in terms(arms, "sample", "grpo")] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_by_rollout_the_baseline_counts_each_rollout_once(arms: ModuleType) -> None:
    assert terms(arms, "rollout") == [pytest.approx(row) for row in [(0.5, 0.1), *[(-0.5, 0.1)] * 3]]


def test_with_both_a_rollouts_tokens_share_one_weight_as_well(arms: ModuleType) -> None:
    assert terms(arms, "both") == [pytest.approx(row) for row in [(0.5, 1 / 8), *[(-0.5, 1 / 12)] * 3]]


@pytest.mark.parametrize(
    ("name", "push"),
    [
        ("sample", (4 * 0.75 - 6 * 0.25) / (4 * 0.75 + 6 * 0.25)),
        ("rollout", (4 * 0.5 - 6 * 0.5) / (4 * 0.5 + 6 * 0.5)),
        ("both", 0.0),
    ],
)
def test_push_is_what_all_sampled_tokens_gain_or_lose(arms: ModuleType, name: str, push: float) -> None:
    arm = next(arm for arm in arms.ARMS if arm.name == name)
    scores = arm.score(GROUP, "dr_grpo")
    assert arms.push(train_rows(scores.rollouts, scores.totals, arm.normalization)) == pytest.approx(push, abs=1e-12)


def test_the_measured_gradient_is_that_of_the_update(arms: ModuleType, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    policy = load_policy(make_tiny_policy(tmp_path / "policy"))
    rollouts = scored_rollouts(policy.model)
    scores = score([Candidate(r.group_id, r.reward, r.samples) for r in rollouts], "grpo")
    whole = arms.gradient(policy, parts_of(scores))
    by_group = [arms.gradient(policy, parts_of(scores, group)) for group in ("g0", "g1", "g2")]
    torch.testing.assert_close(torch.stack(by_group).sum(0), whole)
    updated = Updater(policy, TrainConfig()).run(scores.rollouts, scores.totals, 0)
    assert whole.norm().item() == pytest.approx(updated.metrics["grad_norm"], rel=1e-4)


def parts_of(scores: Scores, group: str | None = None) -> list[Any]:
    rows = train_rows(scores.rollouts, scores.totals, "rollout")
    return [row for row in rows if group in (None, scores.rollouts[row.rollout].group_id)]


def test_the_variance_of_a_gradient_is_that_of_the_mean_of_its_groups(arms: ModuleType) -> None:
    # 3 times the parts: 3, 9 and 0, whose mean is 4 and sample variance 21; of a mean of three, 7.
    found = arms.spread([torch.tensor([1.0, 0.0]), torch.tensor([3.0, 0.0])], 3)
    assert (found.squared, found.variance, found.relative) == pytest.approx((16.0, 7.0, 7 / 16))
