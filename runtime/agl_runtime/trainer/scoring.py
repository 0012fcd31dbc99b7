"""From the rewards of whole groups to what the backend trains on (pure).

A rollout without a reward is left out of its group. A group with fewer than two rewards, or with equal ones, gives no
gradient: its rollouts stay in the totals, so that the others' weights do not change, and are not computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agl_runtime.algorithms.advantages import Algorithm, group_advantages
from agl_runtime.samples.types import BuildReport, RolloutSamples, total_report
from agl_runtime.trainer.backends.base import BatchTotals, ScoredRollout

NO_SPREAD = "no group has rewards that differ"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A rollout that has ended: `reward` is None with the reason in `error`."""

    group_id: str
    reward: float | None
    samples: RolloutSamples
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """`rollouts` are those worth computing. `skipped` says why there is none, null when there are some. `report` covers
    every candidate, `totals` those with a reward."""

    rollouts: tuple[ScoredRollout, ...]
    totals: BatchTotals
    groups: int
    groups_without_spread: int
    report: BuildReport
    skipped: str | None


def score(candidates: Sequence[Candidate], algorithm: Algorithm) -> Scores:
    """`candidates` are all rollouts of a batch."""
    scored = [(item, item.reward) for item in candidates if item.reward is not None]
    advantages = group_advantages([reward for _, reward in scored], [item.group_id for item, _ in scored], algorithm)
    rollouts = tuple(
        ScoredRollout(item.group_id, reward, value, item.samples)
        for (item, reward), value, spread in zip(scored, advantages.values, advantages.has_spread, strict=True)
        if spread and item.samples.samples
    )
    groups = len({item.group_id for item in candidates})
    return Scores(
        rollouts=rollouts,
        totals=BatchTotals(
            rollouts=len(scored),
            samples=sum(len(item.samples.samples) for item, _ in scored),
            tokens=sum(item.samples.report.trained_tokens for item, _ in scored),
        ),
        groups=groups,
        groups_without_spread=groups - (advantages.groups - advantages.groups_without_spread),
        report=total_report(item.samples.report for item in candidates),
        skipped=None if rollouts else _why_skipped(candidates, any(advantages.has_spread)),
    )


def _why_skipped(candidates: Sequence[Candidate], any_spread: bool) -> str:
    if all(item.reward is None for item in candidates):
        errors = Counter(item.error or "no reason given" for item in candidates)
        return f"all {len(candidates)} rollouts ended without a reward, most often: {errors.most_common(1)[0][0]}"
    if not any_spread:
        return NO_SPREAD
    untrained = total_report(item.samples.report for item in candidates).untrained
    why = max(untrained, key=lambda reason: untrained[reason], default="the agents made none")
    return f"no model call of a group whose rewards differ can be trained on: {why}"
