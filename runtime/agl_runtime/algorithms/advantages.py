"""From the rewards of groups to one advantage a rollout, whatever number of samples it has.

With rewards r_1..r_n of the rollouts of one task, mean m and sample standard deviation s (divisor n - 1):

    grpo     (r_i - m) / (s + 1e-6)     DeepSeekMath, arXiv:2402.03300, section 4.1.2
    dr_grpo  r_i - m                    Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2
    rloo     r_i - mean of the others   Back to Basics, arXiv:2402.14740, section 2.2; equals (r_i - m) n / (n - 1)

arXiv:2503.20783 also takes the response length out of the loss: combine `dr_grpo` with normalization `token`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from agl_runtime.errors import TrainerError

Algorithm = Literal["grpo", "dr_grpo", "rloo"]

_EPSILON = 1e-6
_SPREAD_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Advantages:
    """`values` and `has_spread` are per rollout, in the order of the rewards. Where a group's rewards do not differ
    (a group of one included) its values are 0, `has_spread` is False and no gradient need be computed."""

    values: tuple[float, ...]
    has_spread: tuple[bool, ...]
    groups: int
    groups_without_spread: int


def group_advantages(rewards: Sequence[float], group_ids: Sequence[Hashable], algorithm: Algorithm) -> Advantages:
    """`rewards` and `group_ids` are per rollout. Raises TrainerError for a reward that is not finite."""
    members: dict[Hashable, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(index)
    values = [0.0] * len(rewards)
    has_spread = [False] * len(rewards)
    flat = 0
    for group_id, indices in members.items():
        group = [rewards[index] for index in indices]
        if not all(math.isfinite(reward) for reward in group):
            raise TrainerError(f"A reward of group {group_id} is not finite.", "Return finite numbers as rewards.")
        if max(group) - min(group) <= _SPREAD_TOLERANCE * max(1.0, *map(abs, group)):
            flat += 1
            continue
        for index, value in zip(indices, _of_group(group, algorithm), strict=True):
            values[index] = value
            has_spread[index] = True
    return Advantages(tuple(values), tuple(has_spread), len(members), flat)


def _of_group(rewards: Sequence[float], algorithm: Algorithm) -> list[float]:
    n = len(rewards)
    mean = math.fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    if algorithm == "grpo":
        scale = math.sqrt(math.fsum(c * c for c in centred) / (n - 1)) + _EPSILON
        return [c / scale for c in centred]
    if algorithm == "rloo":
        return [c * n / (n - 1) for c in centred]
    return centred
