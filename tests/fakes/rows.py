"""Scored rollouts for tests of the update, and a tiny causal language model to take real gradients of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from agl_runtime.samples.types import BuildReport, RolloutSamples, Sample

VOCABULARY = 7


@dataclass(frozen=True)
class Rollout:
    advantage: float
    samples: RolloutSamples


@dataclass(frozen=True)
class Size:
    rollouts: int
    samples: int
    tokens: int


def sample(mask: Sequence[bool], seed: int = 0) -> Sample:
    """A row whose first token is prompt; ids and log-probabilities are random, log-probabilities 0 where untrained."""
    rng = np.random.default_rng([seed, len(mask)])
    trained = np.array([False, *mask])
    return Sample(
        rollout_id="r",
        ids=rng.integers(0, VOCABULARY, trained.size, dtype=np.int32),
        mask=trained,
        logprobs=np.where(trained, -rng.uniform(1.0, 3.0, trained.size), 0).astype(np.float32),
        updates=np.where(trained, 3, -1).astype(np.int32),
        prompt_len=1,
        call_ids=("c",),
    )


def scored(advantage: float, *samples: Sample) -> Rollout:
    return Rollout(advantage, RolloutSamples("r", samples, BuildReport(0, 0, 0)))


def size_of(rollouts: Sequence[Rollout]) -> Size:
    """Of what trains in `rollouts`."""
    tokens = [[int(row.mask.sum()) for row in rollout.samples.samples] for rollout in rollouts]
    return Size(
        rollouts=sum(1 for row in tokens if sum(row)),
        samples=sum(1 for row in tokens for count in row if count),
        tokens=sum(map(sum, tokens)),
    )


class TinyPolicy(nn.Module):
    """One layer of causal attention in float64; padding on the right cannot reach earlier places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.mix = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, VOCABULARY)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        mixed, _ = self.mix(hidden, hidden, hidden, attn_mask=future, need_weights=False)
        logits: Tensor = self.head(hidden + mixed)
        return logits
