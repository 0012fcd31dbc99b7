"""Advantages for verl, one a rollout, with the rollout's weight in the loss folded in.

verl calls an estimator once a batch with all its rows, in any order. Rows belong to rollouts by their labels
(`rows.py`); a rollout counts once, whatever number of rows it has; rows that verl added are left alone. What verl's
loss then sums up (`loss_agg_mode=token-sum`) over any mini-batches, micro-batches and ranks is

    mini_batches * sum over trained tokens of weight * token loss(advantage)

with the weights of `algorithms/weights.py`, as `algorithms/batching.py` has it in the embedded backend.

With `use_kl_in_reward` (train.kl_coef) verl has taken beta (old - reference) from the reward of each token. Advantages
stay those of the rewards alone, and a token's is lowered by beta (1 - exp(reference - old)): the gradient of
`losses.k3` where the policy is the old one. So the KL penalty is the embedded backend's in the first optimizer step of
an update; in later ones it is still taken at the old policy, clipped with the rest, and on stale tokens it is corrected
with the rest.

Not offered, because they need more than one reward a rollout: `gae` (a critic's values), `remax` (a greedy rollout
besides), `gdpo` (several rewards), `optimal_token_baseline` and `tir_optimal_token_baseline` (a baseline for each place
in one row). `grpo_vectorized` and `rloo_vectorized` are `grpo` and `rloo`, which here are the embedded backend's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_runtime.algorithms.advantages import Algorithm, group_advantages
from agl_runtime.algorithms.weights import row_weights
from agl_runtime.config import VERL_ALGORITHMS
from agl_runtime.trainer.backends.base import BatchTotals
from agl_runtime.trainer.backends.verl.rows import Label
from agl_runtime.trainer.backends.verl.settings import ESTIMATOR_PREFIX

WITHOUT_GROUPS = frozenset({"reinforce_plus_plus"})
"""Algorithms that compare with the whole batch, so that groups whose rewards do not differ are trained on as well."""


def register() -> None:
    """Make the offered estimators known to verl in this process; again does nothing."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    for algorithm in VERL_ALGORITHMS:
        name = f"{ESTIMATOR_PREFIX}{algorithm}"
        if name not in ADV_ESTIMATOR_REGISTRY:
            register_adv_est(name)(partial(token_advantages, algorithm))


def token_advantages(
    algorithm: str, token_level_rewards: Tensor, response_mask: Tensor, index: NDArray[np.object_], config: Any
) -> tuple[Tensor, Tensor]:
    """verl's signature behind `algorithm`: tensors [N, L], `index` [N] the rows' labels, `config` its section
    `algorithm` with `agl.normalization` and `agl.mini_batches` in it. Returns advantages [N, L] with the weights folded
    in, and the plain ones, both 0 where nothing is trained. Rewards are read from the labels."""
    rollouts: dict[tuple[str, int], dict[int, Label]] = {}
    for row, text in enumerate(index):
        if (label := Label.parse(text)) is not None:
            rollouts.setdefault((label.group, label.session), {})[row] = label
    heads = [next(iter(rows.values())) for rows in rollouts.values()]
    trained = [[label.row_tokens for label in rows.values()] for rows in rollouts.values()]
    weights = _weights(trained, heads, config.agl.normalization)
    plain, scale = np.zeros(len(index)), np.zeros(len(index))
    for rows, value, shares in zip(
        rollouts.values(), rollout_advantages(heads, algorithm, config), weights, strict=True
    ):
        plain[list(rows)] = value
        scale[list(rows)] = np.array(shares) * config.agl.mini_batches
    none = torch.zeros_like(token_level_rewards)
    values, weight = (torch.from_numpy(of_rows)[:, None] for of_rows in (plain, scale))
    weighted = weight * (values - _kl_gradient(token_level_rewards, rollouts.values(), config))
    mask = response_mask.bool()
    return torch.where(mask, weighted.to(none), none), torch.where(mask, values.to(none), none)


def _kl_gradient(token_level_rewards: Tensor, rollouts: Iterable[Mapping[int, Label]], config: Any) -> Tensor:
    """Of each token [N, L], or a 0 for all without KL."""
    if not config.use_kl_in_reward:
        return torch.zeros(1, dtype=torch.float64)
    scores = torch.zeros_like(token_level_rewards)
    for rows in rollouts:
        for row, label in rows.items():
            scores[row, label.length - 1] = label.reward
    beta = config.kl_ctrl.kl_coef
    log_ratio = (token_level_rewards - scores).double() / beta
    return cast(Tensor, -beta * torch.expm1(log_ratio.clamp(-20, 20)))


def rollout_advantages(rollouts: Sequence[Label], algorithm: str, config: Any) -> Sequence[float]:
    """One advantage for each of `rollouts`, which are all of a batch, each once. Where rewards of a group do not differ
    (a group of one included) it is 0, unless `algorithm` compares without groups."""
    rewards = [rollout.reward for rollout in rollouts]
    groups = [rollout.group for rollout in rollouts]
    own: tuple[str, ...] = get_args(Algorithm)
    if algorithm in own:
        return group_advantages(rewards, groups, cast(Algorithm, algorithm)).values
    if algorithm in WITHOUT_GROUPS:
        return _by_verl(rollouts, algorithm, config)
    size = Counter(groups)
    # To verl's estimators a group of one has the baseline 0, or is an error.
    compared = [rollout for rollout in rollouts if size[rollout.group] > 1]
    found = dict(zip(compared, _by_verl(compared, algorithm, config), strict=True))
    spread = group_advantages(rewards, groups, "dr_grpo").has_spread
    return [found[rollout] if differs else 0.0 for rollout, differs in zip(rollouts, spread, strict=True)]


def _by_verl(rollouts: Sequence[Label], algorithm: str, config: Any) -> list[float]:
    """Each rollout is one row to verl's estimator: a column that is trained and has the reward, so that statistics over
    the batch count rollouts, and for `opo`, which weighs by lengths, a second one that makes up the length."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    if len(rollouts) < 2:
        return [0.0] * len(rollouts)
    rewards = torch.tensor([[rollout.reward, 0.0] for rollout in rollouts], dtype=torch.float64)
    rest = [rollout.tokens - 1 if algorithm == "opo" else 0 for rollout in rollouts]
    mask = torch.tensor([[1, tokens] for tokens in rest], dtype=torch.float64)
    groups = np.array([rollout.group for rollout in rollouts], dtype=object)
    advantages, _ = get_adv_estimator_fn(algorithm)(
        token_level_rewards=rewards, response_mask=mask, index=groups, config=config
    )
    return cast(list[float], advantages[:, 0].tolist())


def _weights(trained: list[list[int]], rollouts: Sequence[Label], normalization: Any) -> list[list[float]]:
    totals = BatchTotals(
        rollouts=len(rollouts),
        samples=sum(rollout.samples for rollout in rollouts),
        tokens=sum(rollout.tokens for rollout in rollouts),
    )
    return row_weights(trained, totals, normalization) if totals.tokens else [[0.0] * len(rows) for rows in trained]
