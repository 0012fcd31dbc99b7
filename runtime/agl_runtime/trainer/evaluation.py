"""pass@1 with a 95 % confidence interval, from rewards alone.

A rollout passes when its reward is at least 1. pass@1 is the mean over tasks of the share of their rollouts that pass.
With one rollout a task the interval is Wilson's (E. B. Wilson, JASA 22, 1927); with more, rollouts of a task are not
independent, so it is the normal interval over the tasks' shares, cut to [0, 1]. Where that interval would have no
width because all tasks agree, Wilson's over the number of tasks stands in: certainty is not what a few tasks can show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Z_95 = 1.959963984540054
PASS_AT = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`tasks` and `rollouts` count those with a reward; `reward_mean` is over rollouts."""

    pass_at_1: float
    ci_low: float
    ci_high: float
    reward_mean: float
    tasks: int
    rollouts: int


def evaluate(rewards: Mapping[str, Sequence[float]]) -> Evaluation | None:
    """`rewards` are those of each task's rollouts; tasks without any are left out. None when nothing is left."""
    scored = [values for values in rewards.values() if values]
    if not scored:
        return None
    shares = [fmean(value >= PASS_AT for value in values) for values in scored]
    rollouts = sum(len(values) for values in scored)
    low, high = _interval(shares, rollouts)
    mean = fmean(value for values in scored for value in values)
    return Evaluation(fmean(shares), low, high, mean, len(scored), rollouts)


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a proportion seen as `share` in `n` independent trials."""
    z2 = Z_95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _interval(shares: Sequence[float], rollouts: int) -> tuple[float, float]:
    share = fmean(shares)
    if rollouts == len(shares) or min(shares) == max(shares):
        return wilson(share, len(shares))
    half = Z_95 * stdev(shares) / math.sqrt(len(shares))
    return max(0.0, share - half), min(1.0, share + half)
