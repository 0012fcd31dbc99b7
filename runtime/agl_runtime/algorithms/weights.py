"""How much each trained token counts in the loss: loss = sum over tokens of weight * token loss.

Weights are fixed over the whole batch before anything is cut, so the losses and gradients of any parts (mini-batches,
micro-batches, ranks) sum to those of the whole. With R rollouts, N samples and T trained tokens in the batch:

    rollout  1 / (R * trained tokens of the token's rollout)   mean over a rollout's tokens, then over rollouts
    sample   1 / (N * trained tokens of the token's sample)    mean over a sample's tokens, then over samples
    token    1 / T                                             mean over tokens

Under `rollout` a rollout counts 1 / R whatever number of samples and tokens it has. The weights of a batch sum to 1
when every rollout in R and every sample in N has a trained token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

Normalization = Literal["rollout", "sample", "token"]


class Totals(Protocol):
    """Size of the whole batch, also of what is not computed because its rollouts cannot give a gradient."""

    @property
    def rollouts(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def tokens(self) -> int: ...


def row_weights(trained: Sequence[Sequence[int]], totals: Totals, normalization: Normalization) -> list[list[float]]:
    """The weight of a trained token in each row; `trained[r][s]` counts the trained tokens of sample s of rollout r."""
    if normalization == "token":
        return [[1.0 / totals.tokens for _ in samples] for samples in trained]
    if normalization == "sample":
        return [[_share(totals.samples, tokens) for tokens in samples] for samples in trained]
    return [[_share(totals.rollouts, sum(samples)) for _ in samples] for samples in trained]


def _share(parts: int, tokens: int) -> float:
    return 1.0 / (parts * tokens) if tokens else 0.0
