"""The policy loss over trained tokens. All tensors have one shape, one value a token; where the weight is 0 the value
must only be finite.

Three log-probabilities of the same token are kept apart:

    recorded  by the weights that sampled it, as the model server gave it (behaviour policy)
    old       by the weights before the first optimizer step of this update (proximal policy): recomputed by the
              caller without gradient, or the recorded ones themselves where it does not recompute
    new       by the weights now, with gradient

    ratio     r = exp(new - old)
    surrogate -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)           PPO, arXiv:1707.06347; unequal bounds as in
                                                                          DAPO, arXiv:2503.14476
    stale     the surrogate times min(cap, exp(old - recorded)), a constant to the gradient; 1 where old is recorded
                                                                          decoupled PPO, arXiv:2110.00641, truncated as
                                                                          in IMPALA, arXiv:1802.01561
    KL        kl_coef (exp(d) - d - 1) with d = reference - new           estimator k3 of joschu.net/blog/kl-approx.html

The loss is the sum of weight * token loss (`weights.py`). Differences of log-probabilities are clamped to +-20 before
exp, so that everything stays finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agl_runtime.errors import TrainerError

_LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True, slots=True)
class LossSettings:
    """`clip_low` and `clip_high` bound the ratio at 1 - clip_low and 1 + clip_high; `tis_cap` None switches the
    correction of stale tokens off; `kl_coef` weighs the KL to the reference, which is needed only where it is not 0."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    tis_cap: float | None = None


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss` is a scalar with gradient. `metrics` are scalars without: weighted sums that add up over micro-batches as
    `loss` does, to be divided by the sum of `weight` for a mean.

    `kl` is to the reference where there is one, else to the old policy; `clip_fraction` the share where the clip holds
    the ratio back; `tis_weight` the correction of stale tokens and `tis_capped` the share where its cap holds it back,
    where there is one; `entropy` only where it was given.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def policy_loss(
    new: Tensor,
    old: Tensor,
    recorded: Tensor,
    advantages: Tensor,
    weights: Tensor,
    settings: LossSettings,
    *,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> PolicyLoss:
    """The loss of a micro-batch; all tensors have one shape. `reference` are the log-probabilities of the reference
    policy; `entropy` is only reported. Raises TrainerError where `kl_coef` is not 0 and there is no reference."""
    if settings.kl_coef and reference is None:
        raise TrainerError("The KL penalty has no reference policy.", "Set train.kl_coef to 0 or give a reference.")
    old = old.detach()
    ratio = _exp(new - old)
    surrogate = clipped_surrogate(ratio, advantages, settings.clip_low, settings.clip_high)
    parts = {}
    if settings.tis_cap is not None:
        stale = staleness_weight(old, recorded, settings.tis_cap)
        surrogate = surrogate * stale
        parts = {"tis_weight": stale, "tis_capped": (stale >= settings.tis_cap).to(weights.dtype)}
    kl = k3(new, old if reference is None else reference.detach())
    token_loss = surrogate if reference is None else surrogate + settings.kl_coef * kl
    loss = (weights * token_loss).sum()
    held_back = torch.where(advantages > 0, ratio > 1 + settings.clip_high, ratio < 1 - settings.clip_low)
    parts |= {
        "loss": token_loss,
        "kl": kl,
        "clip_fraction": (held_back & (advantages != 0)).to(weights.dtype),
        "weight": torch.ones_like(weights),
    }
    if entropy is not None:
        parts["entropy"] = entropy
    return PolicyLoss(loss, {name: (weights * part.detach()).sum() for name, part in parts.items()})


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-min(ratio * A, clip(ratio) * A) for each token."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def staleness_weight(old: Tensor, recorded: Tensor, cap: float) -> Tensor:
    """min(cap, exp(old - recorded)) for each token, without gradient."""
    return _exp((old - recorded).detach()).clamp(max=cap)


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = reference - new: never negative, and in expectation over tokens of the new policy
    KL(new || reference)."""
    d = _bounded(reference - new)
    return torch.expm1(d) - d


def _bounded(difference: Tensor) -> Tensor:
    return difference.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)


def _exp(difference: Tensor) -> Tensor:
    return _bounded(difference).exp()
