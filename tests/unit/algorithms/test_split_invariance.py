"""However a batch is cut, a real model gets the gradient of the whole, computed here without any of the batching."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agl_runtime.algorithms.batching import TrainRow, micro_batches, mini_batches, pad_rows, to_tensors, train_rows
from agl_runtime.algorithms.logprobs import token_logprobs
from agl_runtime.algorithms.losses import LossSettings, policy_loss
from agl_runtime.algorithms.weights import Normalization
from fakes.rows import Rollout, TinyPolicy, sample, scored, size_of

torch.set_num_threads(1)

POLICY = TinyPolicy()
SETTINGS = LossSettings(clip_low=0.2, clip_high=0.3, kl_coef=0.05, tis_cap=1.5)
NORMALIZATIONS: list[Normalization] = ["rollout", "sample", "token"]
BY_PART = settings(max_examples=40, deadline=None)


@st.composite
def batches(draw: st.DrawFn) -> list[Rollout]:
    masks = st.lists(st.booleans(), min_size=1, max_size=9).map(lambda mask: [*mask, True])
    return [
        scored(
            draw(st.sampled_from([-1.5, -0.5, 0.0, 0.7, 2.0])),
            *(sample(draw(masks), seed=draw(st.integers(0, 99))) for _ in range(draw(st.integers(1, 3)))),
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


def gradient(*losses: Callable[[], Tensor]) -> Tensor:
    """Of the sum of the losses, each backpropagated by itself."""
    POLICY.zero_grad()
    for loss in losses:
        loss().backward()
    return torch.cat([p.grad.flatten() for p in POLICY.parameters() if p.grad is not None])


def old_and_reference(recorded: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Any fixed functions of a token serve: what matters is that every cut sees the same values."""
    return recorded + 0.1 * (targets % 3 - 1), recorded - 0.2 * (targets % 2)


def loss_of(rows: Sequence[TrainRow]) -> Tensor:
    batch = to_tensors(rows, pad_id=0)
    new = token_logprobs(batch.select(POLICY(batch.ids)), batch.targets)
    old, reference = old_and_reference(batch.recorded, batch.targets)
    return policy_loss(new, old, batch.recorded, batch.advantages, batch.weights, SETTINGS, reference=reference).loss


def whole_loss(rollouts: Sequence[Rollout], normalization: Normalization) -> Tensor:
    """Row by row, and means of means written out."""
    per_rollout = []
    for rollout in rollouts:
        per_row = []
        for row in rollout.samples.samples:
            ids = torch.from_numpy(row.ids).long()
            logprobs = torch.log_softmax(POLICY(ids[None])[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
            mask = torch.from_numpy(row.mask)[1:]
            new, targets = logprobs[mask], ids[1:][mask]
            recorded = torch.from_numpy(row.logprobs)[1:][mask]
            old, reference = old_and_reference(recorded, targets)
            ratio = (new - old).exp()
            gain = torch.min(ratio * rollout.advantage, ratio.clamp(0.8, 1.3) * rollout.advantage)
            kl = (reference - new).exp() - (reference - new) - 1
            per_row.append(-(old - recorded).exp().clamp(max=1.5) * gain + 0.05 * kl)
        per_rollout.append(per_row)
    if normalization == "rollout":
        return torch.stack([torch.cat(per_row).mean() for per_row in per_rollout]).mean()
    if normalization == "sample":
        return torch.stack([row.mean() for per_row in per_rollout for row in per_row]).mean()
    return torch.cat([row for per_row in per_rollout for row in per_row]).mean()


def close(a: Tensor, b: Tensor) -> None:
    """Weights are float32, so equality is to its rounding."""
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@BY_PART
@given(batches(), st.integers(1, 60))
def test_micro_batches_sum_to_the_gradient_of_the_whole(
    normalization: Normalization, rollouts: list[Rollout], budget: int
):
    rows = train_rows(rollouts, size_of(rollouts), normalization)
    whole = gradient(lambda: whole_loss(rollouts, normalization))
    close(gradient(*(lambda m=micro: loss_of(m) for micro in micro_batches(rows, budget))), whole)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@BY_PART
@given(batches(), st.integers(1, 4), st.integers(1, 60))
def test_the_mean_over_mini_batches_is_the_gradient_of_the_whole(
    normalization: Normalization, rollouts: list[Rollout], count: int, budget: int
):
    rows = train_rows(rollouts, size_of(rollouts), normalization)
    minis = mini_batches(rows, count)
    micros = [micro for mini in minis for micro in micro_batches(mini, budget)]
    got = gradient(*(lambda m=micro: loss_of(m) for micro in micros)) / len(minis)
    close(got, gradient(lambda: whole_loss(rollouts, normalization)))


@BY_PART
@given(batches(), st.data())
def test_any_split_over_ranks_with_padding_rows_sums_to_the_gradient_of_the_whole(
    rollouts: list[Rollout], data: st.DataObject
):
    rows = train_rows(rollouts, size_of(rollouts), "rollout")
    ranks: list[list[TrainRow]] = [[], [], []]
    for row in pad_rows(rows, data.draw(st.integers(1, 5))):
        ranks[data.draw(st.integers(0, 2))].append(row)
    micros = [micro for rank in ranks for micro in micro_batches(rank, data.draw(st.integers(1, 60)))]
    close(
        gradient(*(lambda m=micro: loss_of(m) for micro in micros)), gradient(lambda: whole_loss(rollouts, "rollout"))
    )


@BY_PART
@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_the_rollouts_does_not_matter(rollouts: list[Rollout], rng: random.Random):
    mixed = rng.sample(rollouts, len(rollouts))
    plain = gradient(lambda: loss_of(train_rows(rollouts, size_of(rollouts), "rollout")))
    close(gradient(lambda: loss_of(train_rows(mixed, size_of(mixed), "rollout"))), plain)


def test_leaving_out_what_has_no_gradient_changes_nothing():
    flat = scored(0.0, sample([True, True], seed=5))
    live = [scored(1.0, sample([True, False, True])), scored(-1.0, sample([True], seed=2), sample([True], seed=3))]
    without_kl = LossSettings()

    def loss(rows: Sequence[TrainRow]) -> Tensor:
        batch = to_tensors(rows, 0)
        new = token_logprobs(batch.select(POLICY(batch.ids)), batch.targets)
        return policy_loss(new, new.detach(), batch.recorded, batch.advantages, batch.weights, without_kl).loss

    whole = size_of([*live, flat])
    everything = gradient(lambda: loss(train_rows([*live, flat], whole, "rollout")))
    close(gradient(lambda: loss(train_rows(live, whole, "rollout"))), everything)


def test_cutting_a_rollout_into_more_samples_leaves_its_share_of_the_loss():
    """Three rows with the same content as one: the same tokens, the same advantage, the same share."""
    row = sample([True, True, False, True])
    thrice = [scored(1.0, row, row, row), scored(-1.0, sample([True], seed=4))]
    once = [scored(1.0, row), scored(-1.0, sample([True], seed=4))]
    close(
        gradient(lambda: loss_of(train_rows(thrice, size_of(thrice), "rollout"))),
        gradient(lambda: loss_of(train_rows(once, size_of(once), "rollout"))),
    )
