from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agl_runtime.config import TrainConfig
from agl_runtime.errors import TrainerError
from agl_runtime.trainer.backends.base import ScoredRollout
from agl_runtime.trainer.backends.embedded.policy import Policy
from agl_runtime.trainer.backends.embedded.update import Updated, Updater
from fakes.scored import scored_rollouts, totals_of

Load = Callable[[], Policy]


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"lr": 1e-3, **changes})


def update(
    policy: Policy, rollouts: list[ScoredRollout], settings: TrainConfig, *, updates: int = 0, extra: int = 0
) -> Updated:
    reference = policy if settings.kl_coef else None
    return Updater(policy, settings, reference).run(rollouts, totals_of(rollouts, extra), updates)


def weights(policy: Policy) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in policy.model.parameters()])


def logprob_of(policy: Policy, rollout: ScoredRollout) -> float:
    """Mean log-probability of a rollout's trained tokens."""
    values = []
    for sample in rollout.samples.samples:
        ids = torch.tensor(sample.ids.astype(np.int64))
        with torch.no_grad():
            logprobs = policy.model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        values += logprobs.gather(1, ids[1:, None])[:, 0][torch.tensor(sample.mask[1:])].tolist()
    return sum(values) / len(values)


def test_what_was_rewarded_becomes_likelier_and_the_rest_less(fresh_policy: Load) -> None:
    policy = fresh_policy()
    rollouts = scored_rollouts(policy.model)
    before = [logprob_of(policy, rollout) for rollout in rollouts]
    assert update(policy, rollouts, config()).steps == 1
    gains = [logprob_of(policy, rollout) - old for rollout, old in zip(rollouts, before, strict=True)]
    assert all((gain > 0) == (rollout.advantage > 0) for gain, rollout in zip(gains, rollouts, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.4])
def test_recomputed_logprobs_are_the_recorded_ones_at_the_training_temperature(
    fresh_policy: Load, temperature: float
) -> None:
    policy = fresh_policy()
    rollouts = scored_rollouts(policy.model, temperature=temperature)
    result = update(policy, rollouts, config(temperature=temperature))
    assert 0 < result.metrics["logprob_gap"] < 1e-4


def test_the_gap_counts_fresh_tokens_only(fresh_policy: Load) -> None:
    rollouts = scored_rollouts(fresh_policy().model, updates=3, temperature=2.0)
    assert update(fresh_policy(), rollouts, config(), updates=3).metrics["logprob_gap"] > 0.1
    assert update(fresh_policy(), rollouts, config(), updates=4).metrics.get("logprob_gap") is None


@pytest.mark.parametrize("normalization", ["rollout", "sample", "token"])
@pytest.mark.parametrize("budget", [16, 60, 200])
def test_the_token_budget_does_not_change_the_update(fresh_policy: Load, normalization: str, budget: int) -> None:
    # AdamW's first step only knows the gradient's sign; momentum without scaling shows the gradient itself.
    def gradient(token_budget: int) -> Tensor:
        policy = fresh_policy()
        settings = config(token_budget=token_budget, normalization=normalization, max_grad_norm=1e9)
        updater = Updater(policy, settings)
        updater.optimizer = torch.optim.SGD(policy.model.parameters(), lr=1.0)  # type: ignore[assignment]
        start = weights(policy)
        rollouts = scored_rollouts(policy.model)
        updater.run(rollouts, totals_of(rollouts), 0)
        return start - weights(policy)

    whole = gradient(100_000)
    torch.testing.assert_close(gradient(budget), whole, rtol=1e-4, atol=float(whole.abs().max()) * 1e-5)


def test_the_same_update_gives_the_same_bits(fresh_policy: Load) -> None:
    results = []
    for policy in (fresh_policy(), fresh_policy()):
        update(policy, scored_rollouts(policy.model), config(mini_batches=2, epochs=2))
        results.append(weights(policy))
    assert torch.equal(*results)


def test_mini_batches_and_epochs_are_optimizer_steps(fresh_policy: Load) -> None:
    policy = fresh_policy()
    result = update(policy, scored_rollouts(policy.model), config(mini_batches=3, epochs=2))
    assert result.steps == 6
    assert result.metrics["logprob_gap"] < 1e-4


def test_later_epochs_are_clipped_against_the_weights_before_the_update(fresh_policy: Load) -> None:
    policy = fresh_policy()
    rollouts = scored_rollouts(policy.model)
    assert update(policy, rollouts, config()).metrics["clip_fraction"] == 0
    again = update(fresh_policy(), rollouts, config(epochs=8, lr=1e-2)).metrics
    assert again["clip_fraction"] > 0
    assert again["kl"] > 0


def test_stale_tokens_weigh_at_most_the_cap(fresh_policy: Load) -> None:
    def figures(**changes: Any) -> dict[str, float]:
        policy = fresh_policy()
        rollouts = [
            replace(rollout, samples=replace(rollout.samples, samples=tuple(map(unlikely, rollout.samples.samples))))
            for rollout in scored_rollouts(policy.model)
        ]
        return update(policy, rollouts, config(**changes)).metrics

    def unlikely(sample: Any) -> Any:
        return replace(sample, logprobs=np.where(sample.mask, sample.logprobs - 5, 0).astype(np.float32))

    corrected, plain = figures(tis_cap=2.0), figures(tis_cap=None)
    assert corrected["grad_norm"] == pytest.approx(2 * plain["grad_norm"], rel=1e-4)
    assert (corrected["tis_weight"], corrected["tis_capped"]) == (pytest.approx(2.0), pytest.approx(1.0))


def test_fresh_tokens_weigh_one(fresh_policy: Load) -> None:
    policy = fresh_policy()
    metrics = update(policy, scored_rollouts(policy.model), config(mini_batches=2)).metrics
    assert (metrics["tis_weight"], metrics["tis_capped"]) == (pytest.approx(1.0, abs=1e-4), 0.0)


def test_the_kl_penalty_holds_on_to_the_reference(fresh_policy: Load) -> None:
    start = fresh_policy()

    def distance(kl_coef: float) -> float:
        policy, reference = fresh_policy(), fresh_policy()
        updater = Updater(policy, config(kl_coef=kl_coef, epochs=6, lr=3e-3), reference if kl_coef else None)
        rollouts = scored_rollouts(policy.model)
        updater.run(rollouts, totals_of(rollouts), 0)
        return float((weights(policy) - weights(start)).norm())

    assert distance(10.0) < 0.7 * distance(0.0)


def test_rollouts_that_are_only_counted_shrink_the_gradient(fresh_policy: Load) -> None:
    rollouts = scored_rollouts(fresh_policy().model)
    alone, among = (update(fresh_policy(), rollouts, config(), extra=extra).metrics for extra in (0, 6))
    assert among["grad_norm"] == pytest.approx(alone["grad_norm"] / 2, rel=1e-4)


def test_metrics_are_finite_and_complete(fresh_policy: Load) -> None:
    policy = fresh_policy()
    metrics = update(policy, scored_rollouts(policy.model), config()).metrics
    names = {"loss", "grad_norm", "kl", "clip_fraction", "entropy", "tis_weight", "tis_capped", "logprob_gap", "tokens"}
    assert set(metrics) == names
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0 < metrics["entropy"] < math.log(320)


def no_advantage(rollouts: list[ScoredRollout]) -> list[ScoredRollout]:
    return [replace(rollout, advantage=0.0) for rollout in rollouts]


def no_token(rollouts: list[ScoredRollout]) -> list[ScoredRollout]:
    def masked(sample: Any) -> Any:
        return replace(sample, mask=np.zeros_like(sample.mask))

    return [replace(r, samples=replace(r.samples, samples=tuple(map(masked, r.samples.samples)))) for r in rollouts]


@pytest.mark.parametrize("emptied", [no_advantage, no_token])
def test_without_a_gradient_nothing_moves_not_even_by_momentum(
    fresh_policy: Load, emptied: Callable[[list[ScoredRollout]], list[ScoredRollout]]
) -> None:
    policy = fresh_policy()
    updater = Updater(policy, config(weight_decay=0.1))
    rollouts = scored_rollouts(policy.model)
    updater.run(rollouts, totals_of(rollouts), 0)
    before = weights(policy)
    result = updater.run(emptied(rollouts), totals_of(rollouts), 1)
    assert result.steps == 0
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert torch.equal(weights(policy), before)


def test_a_gradient_that_is_not_finite_is_an_error_and_leaves_the_weights(fresh_policy: Load) -> None:
    policy = fresh_policy()
    rollouts = scored_rollouts(policy.model)
    before = weights(policy)
    with pytest.raises(TrainerError, match="gradient of an update is not finite"):
        update(policy, [replace(rollouts[0], advantage=math.inf), *rollouts[1:]], config())
    assert torch.equal(weights(policy), before)


@dataclass(frozen=True)
class Counted(Policy):
    """Notes for how many columns of how many it computed logits."""

    columns: list[tuple[int, int]] = field(default_factory=list)

    def logits(self, ids: Tensor, *args: Any, **named: Any) -> Tensor:
        logits = super().logits(ids, *args, **named)
        self.columns.append((logits.shape[1], ids.shape[1]))
        return logits


def test_prompts_cost_no_logits(fresh_policy: Load) -> None:
    policy = Counted(**vars(fresh_policy()))
    rollouts = scored_rollouts(policy.model)
    update(policy, rollouts, config(token_budget=16))  # a row a pass
    rows = [sample for rollout in rollouts for sample in rollout.samples.samples]
    assert sorted(policy.columns) == sorted((row.ids.size - row.prompt_len + 1, row.ids.size) for row in rows)


@dataclass(frozen=True)
class Cramped(Policy):
    def logits(self, *_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_gpu_that_is_too_small_is_told_with_the_remedy(fresh_policy: Load) -> None:
    policy = fresh_policy()
    with pytest.raises(TrainerError) as caught:
        update(Cramped(**vars(policy)), scored_rollouts(policy.model), config())
    assert caught.value.fix == "Lower train.token_budget."
