"""The three ways of the ablation to make an update from rollouts with unequal numbers of samples, and what is measured
of each.

    sample   every sample is a rollout of its own: a rollout with five samples is five members of its group, in mean and
             in deviation. This is what a trainer does that takes rows for rollouts; agl has no such setting, so here
             the rollouts are cut into single samples before agl's own scoring sees them.
    rollout  one advantage a rollout, and the loss still a mean over the batch's tokens.
    both     one advantage a rollout, and the loss a mean over each rollout's tokens, then over rollouts: agl's default.

`sample` and `rollout` differ in the advantage alone, `rollout` and `both` in the normalisation alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agl_runtime.algorithms.advantages import Algorithm
from agl_runtime.algorithms.batching import TrainRow, micro_batches, to_tensors
from agl_runtime.algorithms.logprobs import token_logprobs
from agl_runtime.algorithms.losses import LossSettings, policy_loss
from agl_runtime.algorithms.weights import Normalization
from agl_runtime.trainer.backends.embedded.policy import Policy
from agl_runtime.trainer.scoring import Candidate, Scores, score

TOKEN_BUDGET = 8192


@dataclass(frozen=True)
class Arm:
    name: str
    by_sample: bool
    normalization: Normalization

    def score(self, candidates: Sequence[Candidate], algorithm: Algorithm) -> Scores:
        return score(one_sample_each(candidates) if self.by_sample else candidates, algorithm)


ARMS = (Arm("sample", True, "token"), Arm("rollout", False, "token"), Arm("both", False, "rollout"))


def one_sample_each(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Each sample as a candidate of its own, with the reward of its rollout."""
    return [
        replace(
            candidate,
            samples=replace(
                candidate.samples,
                samples=(sample,),
                report=replace(candidate.samples.report, trained_tokens=int(sample.mask.sum())),
            ),
        )
        for candidate in candidates
        for sample in candidate.samples.samples
    ]


def push(rows: Sequence[TrainRow]) -> float:
    """Sum of weight times advantage over all trained tokens, over that of its absolute value: -1 where everything that
    was sampled is made less likely, 1 where all of it is made likelier, 0 where the two are in balance."""
    terms = [row.weight * row.advantage * int(row.row.mask.sum()) for row in rows]
    return sum(terms) / sum(map(abs, terms))


def gradient(policy: Policy, rows: Sequence[TrainRow], temperature: float = 1.0) -> Tensor:
    """Of the loss of `rows` by all weights, flat [parameters]: what they add to an update's gradient before it is
    clipped, at the weights that sampled them. The policy's own gradients are left empty."""
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    for micro in micro_batches(rows, TOKEN_BUDGET):
        batch = to_tensors(micro, 0)
        mask = batch.attention.long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = batch.select(policy.logits(batch.ids, mask, positions, columns=batch.columns))
        new = token_logprobs(logits, batch.targets, temperature)
        loss = policy_loss(new, new.detach(), batch.recorded, batch.advantages, batch.weights, LossSettings()).loss
        loss.backward()
    flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in parameters])
    policy.model.zero_grad(set_to_none=True)
    return flat


@dataclass(frozen=True)
class Spread:
    """Of a gradient that is a sum over groups: `squared` is its squared norm, `variance` the variance of that estimate.

    With K groups (tasks, drawn independently), parts g_1 .. g_K and g their sum, K g_k are K estimates whose mean is
    g, and the variance of g, summed over all weights, is estimated by sum |K g_k - g|^2 / (K (K - 1)). A group without
    a gradient is an estimate too: 0. `relative` is an estimate of the noise scale of arXiv:1812.06162, section 2.2, in
    batches, but for the noise that `squared` contains as well.
    """

    squared: float
    variance: float

    @property
    def relative(self) -> float:
        """`variance` over `squared`: near 1 where the gradient is little but noise."""
        return self.variance / self.squared


def spread(parts: Sequence[Tensor], groups: int) -> Spread:
    """`parts` are those of the groups with a gradient, of `groups` in the batch (at least 2)."""
    whole = torch.stack(list(parts)).sum(0)
    squares = sum(float((groups * part - whole).square().sum()) for part in parts)
    squares += (groups - len(parts)) * float(whole.square().sum())
    return Spread(float(whole.square().sum()), squares / (groups * (groups - 1)))
