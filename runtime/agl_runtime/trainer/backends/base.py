"""What trains: the Protocol that the embedded backend and verl fulfil.

A backend's package has `create(config: Config, policy: Path) -> Backend`, which imports what is heavy and raises
PreconditionError where a package is missing; `policy` is the Hugging Face folder of the weights to start from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from agl_runtime.samples.types import RolloutSamples
from agl_runtime.schemas import Model, PolicyVersion


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """One rollout of an update. `advantage` is per rollout; its samples share it."""

    group_id: str
    reward: float
    advantage: float
    samples: RolloutSamples


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Size of the whole batch: its rollouts with a reward, their samples and their trained tokens, those of groups
    without any spread included. These are the denominators of the normalisations `rollout`, `sample` and `token`."""

    rollouts: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """`metrics` are finite floats: loss, grad_norm, kl, clip_fraction, entropy, logprob_gap (the largest absolute
    difference of recorded and recomputed log-probabilities of fresh tokens, if there are any), tis_weight and
    tis_capped (the correction of stale tokens: its mean, and the share of tokens at its cap), tokens, seconds."""

    version: PolicyVersion
    metrics: Mapping[str, float]


class Backend(Protocol):
    """Calls come from one asyncio loop. `update` is only called while the gateway holds calls and none is in flight."""

    async def start(self, run_epoch: int, resume_from: Path | None) -> Model:
        """Load the policy (or all trainer state from a checkpoint), serve it, say where.

        The version served is (`run_epoch`, n): n is 0, or `updates` in the checkpoint's `state.json`."""
        ...

    async def update(self, rollouts: Sequence[ScoredRollout], totals: BatchTotals) -> UpdateResult:
        """One update over the whole batch; afterwards the new weights serve.

        `rollouts` are those that can give a gradient; `totals` counts also the ones that need no computing, so that
        leaving them out changes no mean. Never called with an empty sequence."""
        ...

    async def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write a checkpoint into `folder` (which does not exist yet) so that a crash leaves all of it or nothing:
        the policy in Hugging Face layout at its top, the optimizer and RNG, and `state` as `state.json`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens kept."""
        ...

    async def stop(self) -> None: ...
