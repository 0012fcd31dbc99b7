"""Validation: rollouts of held-out tasks under the weights that serve, and what they amount to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agl_runtime.trainer.evaluation import Evaluation, evaluate
from agl_runtime.trainer.progress import Progress
from agl_runtime.trainer.rollouts import Ended, RolloutDesk, Work


@dataclass(frozen=True, slots=True)
class Measured:
    """`result` is None when no rollout got a reward."""

    result: Evaluation | None
    ended: tuple[Ended, ...]
    seconds: float


async def measure(desk: RolloutDesk, work: Sequence[Work], progress: Progress) -> Measured:
    """Run all of `work`, one item a task."""
    began = time.monotonic()
    progress.enter("validating", sum(item.size for item in work), "rollouts")

    def on_ended(ended: Ended) -> None:
        progress.finished()
        progress.sampled(ended.sampled_tokens)

    await desk.enqueue(work)
    ended = await asyncio.gather(*(desk.results(item, on_ended) for item in work))
    rewards = {
        item.task.task_id: [rollout.reward for rollout in rollouts if rollout.reward is not None]
        for item, rollouts in zip(work, ended, strict=True)
    }
    everyone = tuple(rollout for rollouts in ended for rollout in rollouts)
    return Measured(evaluate(rewards), everyone, time.monotonic() - began)
