"""The same recorded batch for the embedded backend and for verl, and the ways to cut it that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agl_runtime.algorithms.weights import Normalization
from agl_runtime.samples.types import Sample
from fakes.groups import Group

TRAIN: dict[str, Any] = {
    "algorithm": "grpo",
    "groups_per_step": 4,
    "group_size": 4,
    "temperature": 0.8,
    "max_prompt_tokens": 32,
    "max_response_tokens": 96,
}


@dataclass(frozen=True)
class Case:
    """`micro_batches` are what verl's workers read of a batch. The KL penalty is compared without the correction of
    stale tokens, which with verl is that of the penalty too."""

    name: str
    normalization: Normalization = "rollout"
    mini_batches: int = 1
    kl_coef: float = 0.0
    micro_batches: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def tis_cap(self) -> float | None:
        return None if self.kl_coef else 1.5


CASES = (
    Case("whole"),
    Case("rows_alone", micro_batches={"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}),
    Case("small_budget", micro_batches={"max_token_len_per_gpu": 128}),
    Case("two_mini_batches", mini_batches=2),
    Case("three_mini_batches_of_rows", mini_batches=3, micro_batches={"max_token_len_per_gpu": 128}),
    Case("by_sample", "sample"),
    Case("by_token", "token", mini_batches=2),
    Case("more_mini_batches_than_rollouts", mini_batches=8),
    Case("with_kl", kl_coef=0.3),
    Case("with_kl_in_two_mini_batches", mini_batches=2, kl_coef=0.3),
)


def recorded_groups() -> dict[str, Group]:
    """Rollouts with one to three samples, one with a reward and nothing to train on, one without a reward, and a group
    whose rewards do not differ. Log-probabilities are not the policy's, so that stale tokens are corrected."""
    source = np.random.default_rng(7)
    return {
        "g0": [(1.0, _samples(source, 3)), (0.0, _samples(source, 1)), (0.3, _samples(source, 2)), (0.0, [])],
        "g1": [(0.5, _samples(source, 2)), (0.5, _samples(source, 1)), (0.5, _samples(source, 1))],
        "g2": [(None, _samples(source, 1)), (-1.0, _samples(source, 1)), (2.0, _samples(source, 3))],
    }


def _samples(source: np.random.Generator, count: int) -> list[Sample]:
    return [_sample(source) for _ in range(count)]


def _sample(source: np.random.Generator) -> Sample:
    prompt, first, between, second, tail = source.integers(1, 9, size=5)
    mask = np.repeat([False, True, False, True, False], [prompt, first, between, second, tail % 2])
    return Sample(
        rollout_id="r",
        ids=source.integers(3, 300, mask.size).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -source.uniform(3.0, 8.0, mask.size), 0.0).astype(np.float32),
        updates=np.where(mask, 3, -1).astype(np.int32),
        prompt_len=int(prompt),
        call_ids=("c",),
    )
