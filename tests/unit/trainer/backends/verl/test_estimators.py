"""The estimators that need nothing of verl, against `trainer/scoring.py` and `algorithms/batching.py`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_runtime.algorithms.advantages import Algorithm
from agl_runtime.algorithms.batching import train_rows
from agl_runtime.algorithms.weights import Normalization
from agl_runtime.trainer.backends.verl.estimators import token_advantages
from agl_runtime.trainer.scoring import score
from fakes.groups import Group, all_rows, candidates, filler, padded, settings_of
from fakes.rows import sample

NORMALIZATIONS: list[Normalization] = ["rollout", "sample", "token"]
ALGORITHMS: list[Algorithm] = ["grpo", "dr_grpo", "rloo"]
MASKS = st.lists(st.booleans(), max_size=6).map(lambda mask: [*mask, True])
SAMPLES = st.lists(st.builds(sample, MASKS, st.integers(0, 99)), max_size=3)
REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.1, 1.0, -2.5, 1 / 3]))
GROUPS = st.lists(st.lists(st.tuples(REWARDS, SAMPLES), min_size=1, max_size=4), min_size=1, max_size=3)


def named(groups: list[Group]) -> dict[str, Group]:
    return {f"g{n}": group for n, group in enumerate(groups)}


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=40, deadline=None)
@given(GROUPS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_advantages_and_weights_are_those_of_the_embedded_backend(
    algorithm: Algorithm, normalization: Normalization, groups: list[Group], minis: int, rng: random.Random
):
    batch = named(groups)
    rows: list[tuple[str, Any]] = [*all_rows(batch), ("pad_0_0", filler())]
    rng.shuffle(rows)
    got = padded(fields for _, fields in rows)
    advantages, returns = token_advantages(
        algorithm, got.rewards, got.mask, got.index, settings_of(normalization, minis)
    )

    scores = score(candidates(batch), algorithm)
    trained = train_rows(scores.rollouts, scores.totals, normalization) if scores.rollouts else []
    names = [f"{item.samples.rollout_id}_{n}" for item in scores.rollouts for n in range(len(item.samples.samples))]
    expected = dict(zip(names, trained, strict=True))
    for (key, _), mask, weighed, plain in zip(rows, got.mask.bool(), advantages, returns, strict=True):
        row = expected.pop(key, None)
        assert row is not None or not mask.any()
        advantage, weight = (row.advantage, row.weight) if row else (0.0, 0.0)
        torch.testing.assert_close(plain, torch.where(mask, advantage, 0.0), rtol=0, atol=0)
        torch.testing.assert_close(weighed, torch.where(mask, advantage * weight * minis, 0.0))
    assert not expected


def test_a_batch_that_trains_nothing_has_advantages_of_zero():
    got = padded([fields for _, fields in all_rows({"g": [(1.0, []), (0.0, [])]})] + [filler()])
    for normalization in NORMALIZATIONS:
        for values in token_advantages("grpo", got.rewards, got.mask, got.index, settings_of(normalization)):
            assert values.tolist() == [[0.0]] * 3


def test_tokens_that_verl_rejects_later_leave_the_others_weights_as_they_were():
    got = padded(fields for _, fields in all_rows({"g": [(1.0, [sample([True, True])]), (0.0, [sample([True])])]}))
    whole, _ = token_advantages("dr_grpo", got.rewards, got.mask, got.index, settings_of("rollout"))
    got.mask[0, 0] = 0
    cut, _ = token_advantages("dr_grpo", got.rewards, got.mask, got.index, settings_of("rollout"))
    assert whole.tolist() == [[0.125, 0.125], [-0.25, 0.0]]
    assert cut.tolist() == [[0.0, 0.125], [-0.25, 0.0]]


def test_kl_lowers_each_token_by_its_own_gradient_and_changes_no_baseline():
    got = padded(
        fields for _, fields in all_rows({"g": [(1.0, [sample([True, True])]), (0.0, [sample([False, True])])]})
    )
    log_ratio = torch.tensor([[0.5, -0.25], [3.0, 1.0]])  # old - reference
    rewards = got.rewards - 0.1 * log_ratio * got.mask
    advantages, returns = token_advantages("dr_grpo", rewards, got.mask, got.index, settings_of("rollout", 1, 0.1))
    assert returns.tolist() == [[0.5, 0.5], [0.0, -0.5]]
    weights = torch.tensor([[0.25, 0.25], [0.0, 0.5]])
    torch.testing.assert_close(advantages, weights * (returns - 0.1 * (1 - (-log_ratio).exp())))
