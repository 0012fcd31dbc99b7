"""Scored rollouts as a policy would have sampled them: random ids, with the log-probabilities that it gives them."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from agl_runtime.samples.types import BuildReport, RolloutSamples, Sample
from agl_runtime.trainer.backends.base import BatchTotals, ScoredRollout


def scored_rollouts(
    model: PreTrainedModel, count: int = 6, *, updates: int = 0, temperature: float = 1.0, seed: int = 0
) -> list[ScoredRollout]:
    """Two to a group, one of them better; some rollouts have two samples, samples have two sampled stretches."""
    source = np.random.default_rng(seed)
    return [
        ScoredRollout(
            group_id=f"g{index // 2}",
            reward=float(index % 2),
            advantage=1.0 if index % 2 else -1.0,
            samples=_rollout(model, f"r{index}", 1 + (index % 3 == 0), updates, temperature, source),
        )
        for index in range(count)
    ]


def totals_of(rollouts: list[ScoredRollout], extra: int = 0) -> BatchTotals:
    """Of a batch with `extra` rollouts more that give no gradient."""
    samples = [sample for rollout in rollouts for sample in rollout.samples.samples]
    tokens = sum(int(sample.mask.sum()) for sample in samples)
    return BatchTotals(len(rollouts) + extra, len(samples) + extra, tokens + 10 * extra)


def _rollout(
    model: PreTrainedModel,
    rollout_id: str,
    count: int,
    updates: int,
    temperature: float,
    source: np.random.Generator,
) -> RolloutSamples:
    samples = tuple(_sample(model, rollout_id, n, updates, temperature, source) for n in range(count))
    tokens = sum(int(sample.mask.sum()) for sample in samples)
    return RolloutSamples(rollout_id, samples, BuildReport(count, tokens, tokens))


def _sample(
    model: PreTrainedModel, rollout_id: str, n: int, updates: int, temperature: float, source: np.random.Generator
) -> Sample:
    prompt, first, between, second = source.integers(2, 12, size=4)
    ids = source.integers(3, 300, size=prompt + first + between + second)
    mask = np.repeat([False, True, False, True], [prompt, first, between, second])
    with torch.no_grad():
        logits = model(torch.tensor(ids)[None], use_cache=False).logits[0, :-1]
        chosen = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]
    logprobs = np.where(mask, np.concatenate([[0.0], chosen.numpy()]), 0.0)
    return Sample(
        rollout_id=rollout_id,
        ids=ids.astype(np.int32),
        mask=mask,
        logprobs=logprobs.astype(np.float32),
        updates=np.where(mask, updates, -1).astype(np.int32),
        prompt_len=int(prompt),
        call_ids=(f"{rollout_id}-{n}",),
    )
