"""Groups of rollouts as a step meets them, and what an estimator gets of their rows in verl's trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_runtime.samples.types import BuildReport, RolloutSamples, Sample
from agl_runtime.trainer.backends.verl.rows import Rows, ScoredSamples, group_rows
from agl_runtime.trainer.scoring import Candidate

Group = Sequence[tuple[float | None, Sequence[Sample]]]
"""Rewards and samples of a group's rollouts."""


def candidates(groups: Mapping[str, Group]) -> list[Candidate]:
    return [
        Candidate(uid, reward, built(f"{uid}_{session}", samples))
        for uid, group in groups.items()
        for session, (reward, samples) in enumerate(group)
    ]


def rows_of(uid: str, group: Group, step: int = 4, **options: bool) -> Rows:
    rollouts = [ScoredSamples(n, reward, built(f"{uid}_{n}", samples)) for n, (reward, samples) in enumerate(group)]
    return group_rows(uid, rollouts, step, **options)


def all_rows(groups: Mapping[str, Group]) -> list[tuple[str, Mapping[str, Any]]]:
    made = [rows_of(uid, group) for uid, group in groups.items()]
    return [pair for rows in made for pair in zip(rows.keys, rows.fields, strict=True)]


def built(rollout_id: str, samples: Sequence[Sample]) -> RolloutSamples:
    tokens = sum(int(sample.mask.sum()) for sample in samples)
    return RolloutSamples(rollout_id, tuple(samples), BuildReport(len(samples), tokens, tokens))


@dataclass(frozen=True)
class Padded:
    """What an estimator gets, [rows, longest response] and [rows]."""

    rewards: Tensor
    mask: Tensor
    index: NDArray[np.object_]


def padded(fields: Iterable[Mapping[str, Any]]) -> Padded:
    rows = list(fields)
    pad = torch.nn.utils.rnn.pad_sequence
    return Padded(
        pad([row["rm_scores"] for row in rows], batch_first=True),
        pad([row["response_mask"] for row in rows], batch_first=True),
        np.array([row["uid"] for row in rows], dtype=object),
    )


def filler() -> dict[str, Any]:
    """A row as verl adds to fill a batch."""
    zeros = torch.zeros(1, dtype=torch.int64)
    return {"rm_scores": zeros.float(), "response_mask": zeros, "uid": "pad0123456789abcdef"}


def settings_of(normalization: str, mini_batches: int = 1, kl_coef: float = 0.0) -> SimpleNamespace:
    """The part of verl's section `algorithm` that agl's estimators read."""
    return SimpleNamespace(
        agl=SimpleNamespace(normalization=normalization, mini_batches=mini_batches),
        use_kl_in_reward=kl_coef > 0,
        kl_ctrl=SimpleNamespace(kl_coef=kl_coef),
    )
