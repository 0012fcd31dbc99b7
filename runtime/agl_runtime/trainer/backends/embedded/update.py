"""One update of the policy from scored rollouts: what `algorithms` defines, run on the weights that serve.

Log-probabilities are recomputed at the temperature of the training rollouts, by the function that sampled them. The
gradient does not depend on how the batch is cut into micro-batches, to rounding; the same policy, optimizer state and
batch give the same weights bit for bit on a CPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agl_runtime.algorithms.batching import TensorBatch, micro_batches, mini_batches, to_tensors, train_rows
from agl_runtime.algorithms.logprobs import token_entropy, token_logprobs
from agl_runtime.algorithms.losses import LossSettings, policy_loss
from agl_runtime.config import TrainConfig
from agl_runtime.errors import TrainerError
from agl_runtime.trainer.backends.base import BatchTotals, ScoredRollout
from agl_runtime.trainer.backends.embedded.policy import Policy

MEANS = ("kl", "clip_fraction", "entropy", "tis_weight", "tis_capped")


@dataclass(frozen=True, slots=True)
class Updated:
    """`steps` is how often the optimizer changed the weights: 0 when nothing gave a gradient. `metrics` are those of
    `base.UpdateResult` except the time."""

    steps: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Micro:
    """A micro-batch, with log-probabilities by the weights before the update and by the reference where needed."""

    batch: TensorBatch
    old: Tensor | None = None
    reference: Tensor | None = None


class Updater:
    """Owns the optimizer. `reference` is the frozen policy that `kl_coef` holds on to."""

    def __init__(self, policy: Policy, config: TrainConfig, reference: Policy | None = None) -> None:
        self._policy = policy
        self._config = config
        self._reference = reference
        self._loss = LossSettings(config.clip_low, config.clip_high, config.kl_coef, config.tis_cap)
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )

    def run(self, rollouts: Sequence[ScoredRollout], totals: BatchTotals, updates: int) -> Updated:
        """Change the weights, which are those after `updates` updates. Raises TrainerError for a gradient that is not
        finite; weights are then as they were before that optimizer step."""
        try:
            return self._run(self._cut(rollouts, totals), updates)
        except torch.OutOfMemoryError as error:
            raise TrainerError("The GPU's memory is too small for an update.", "Lower train.token_budget.") from error
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def _run(self, minis: list[list[_Micro]], updates: int) -> Updated:
        sums: defaultdict[str, float] = defaultdict(float)
        norms: list[float] = []
        for epoch in range(self._config.epochs):
            for mini in minis:
                for micro in mini:
                    self._backward(micro, sums, updates if epoch == 0 else None)
                norms.append(self._step())
        weight = sums["weight"] or 1.0
        return Updated(
            steps=sum(norm > 0 for norm in norms),
            metrics={
                "loss": sums["loss"] / max(len(norms), 1),
                "grad_norm": sum(norms) / max(len(norms), 1),
                **{name: sums[name] / weight for name in MEANS},
                **({"logprob_gap": sums["logprob_gap"]} if "logprob_gap" in sums else {}),
                "tokens": float(sum(micro.batch.targets.numel() for mini in minis for micro in mini)),
            },
        )

    def _cut(self, rollouts: Sequence[ScoredRollout], totals: BatchTotals) -> list[list[_Micro]]:
        rows = train_rows(rollouts, totals, self._config.normalization)
        minis = [
            [
                _Micro(to_tensors(rows, 0, self._policy.device))
                for rows in micro_batches(mini, self._config.token_budget)
            ]
            for mini in (mini_batches(rows, self._config.mini_batches) if rows else [])
        ]
        several = len(minis) * self._config.epochs > 1
        return [[self._with_constants(micro, several) for micro in mini] for mini in minis]

    @torch.no_grad()
    def _with_constants(self, micro: _Micro, several_steps: bool) -> _Micro:
        """Before the only optimizer step of an update, `old` is what the step computes anyway."""
        if several_steps:
            micro = replace(micro, old=self._logprobs(self._policy, micro.batch)[0])
        if self._reference is not None:
            micro = replace(micro, reference=self._logprobs(self._reference, micro.batch)[0])
        return micro

    def _logprobs(self, policy: Policy, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        """Of the trained tokens: log-probabilities [M] and the logits [M, vocabulary] that gave them."""
        mask = batch.attention.long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = batch.select(policy.logits(batch.ids, mask, positions, columns=batch.columns))
        return token_logprobs(logits, batch.targets, self._config.temperature), logits

    def _backward(self, micro: _Micro, sums: dict[str, float], updates: int | None) -> None:
        """Add a micro-batch's gradient and figures, and where `updates` is given the gap of its fresh tokens."""
        batch = micro.batch
        new, logits = self._logprobs(self._policy, batch)
        old = new.detach() if micro.old is None else micro.old
        result = policy_loss(
            new,
            old,
            batch.recorded,
            batch.advantages,
            batch.weights,
            self._loss,
            reference=micro.reference,
            entropy=token_entropy(logits.detach(), self._config.temperature),
        )
        result.loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        for name, value in result.metrics.items():
            sums[name] += value.item()
        if updates is not None:
            gaps = (old - batch.recorded).abs()[batch.updates == updates]
            if gaps.numel():
                sums["logprob_gap"] = max(sums["logprob_gap"], gaps.max().item())

    def _step(self) -> float:
        """Apply the gradient and forget it; returns its norm before clipping. A zero gradient changes nothing, not even
        by the optimizer's momentum."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm).item()
        if math.isfinite(norm) and norm > 0:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            raise TrainerError("The gradient of an update is not finite.", "Lower train.lr and resume.")
        return norm
