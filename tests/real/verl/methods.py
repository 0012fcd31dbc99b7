"""In verl's environment: `python methods.py OUTPUT` compares verl's estimators and losses with what agl makes of them.

Writes JSON: `estimators`, the largest difference of an offered estimator to verl's own where every rollout is one token
(several for opo, whose statistics count tokens); `losses`, by how much the gradient of a loss whose advantages are
weighted differs from the weighted gradients of the loss, 1 where it does not add up tokens when it should.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_adv_estimator_fn
from verl.utils.config import omega_conf_to_dataclass

from agl_runtime.config import VERL_ALGORITHMS, Config
from agl_runtime.trainer.backends.verl.compose import compose
from agl_runtime.trainer.backends.verl.estimators import register
from agl_runtime.trainer.backends.verl.families import Family
from agl_runtime.trainer.backends.verl.settings import ESTIMATOR_PREFIX, Paths, overrides
from fakes.groups import Group, Padded, padded, rows_of
from fakes.rows import sample

REWARDS = {"g0": (1.0, 0.0, 0.25, 1.0), "g1": (-1.0, 3.0, 0.5, 0.0)}


def main(output: Path) -> None:
    torch.set_num_threads(1)
    register()
    train = {"backend": "verl", "device": "cpu"}
    config = Config.model_validate({"agent": {"command": "run"}, "train": train})
    values = overrides(
        config, Paths(Path("p"), Path("c"), Path("t"), None), Family("qwen3", None, None, 512), on_cpu=True
    )
    made = compose(values)
    made.actor_rollout_ref.actor.policy_loss.dro_beta = 0.1
    actor = omega_conf_to_dataclass(made.actor_rollout_ref.actor)
    found = {
        "estimators": {name: estimator_difference(name, made.algorithm) for name in VERL_ALGORITHMS},
        "losses": {name: loss_difference(name, actor) for name in POLICY_LOSS_REGISTRY if name != "bypass_mode"},
    }
    output.write_text(json.dumps(found))


def estimator_difference(algorithm: str, config: Any) -> float:
    got = batch(lengths=algorithm == "opo")
    _, ours = get_adv_estimator_fn(f"{ESTIMATOR_PREFIX}{algorithm}")(
        token_level_rewards=got.rewards, response_mask=got.mask, index=got.index, config=config
    )
    more = {"norm_adv_by_std_in_grpo": algorithm == "grpo"} if algorithm.endswith("grpo") else {}
    theirs, _ = get_adv_estimator_fn("grpo" if more else algorithm)(
        token_level_rewards=got.rewards,
        response_mask=got.mask,
        index=np.array([text.split(":")[0] for text in got.index], dtype=object),
        config=config,
        **more,
    )
    return float((ours - theirs).abs().max())


def batch(*, lengths: bool) -> Padded:
    """Rollouts of one sample and one token; where `lengths`, of several."""
    groups: dict[str, Group] = {
        uid: [(reward, [sample([True] * (1 + (n if lengths else 0)), seed=n)]) for n, reward in enumerate(rewards)]
        for uid, rewards in REWARDS.items()
    }
    return padded(fields for uid, group in groups.items() for fields in rows_of(uid, group).fields)


def loss_difference(mode: str, actor: Any) -> float:
    source = torch.Generator().manual_seed(3)
    old = -3 * torch.rand(4, 8, generator=source)
    new = old + 0.3 * torch.randn(4, 8, generator=source)
    mask = torch.rand(4, 8, generator=source) < 0.7
    mask[:, 0] = True
    advantages = torch.tensor([3.0, -2.0, 0.5, -4.0])[:, None].expand(4, 8)
    weights = torch.tensor([0.05, 0.2, 0.02, 0.1])

    def gradient(rows: slice, advantages: torch.Tensor, mode_of_sum: str = "token-sum") -> torch.Tensor:
        actor.global_batch_info.update(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=4)
        logprobs = new.clone().requires_grad_()
        torch.manual_seed(0)
        loss, _ = POLICY_LOSS_REGISTRY[mode](
            old_log_prob=old[rows],
            log_prob=logprobs[rows],
            advantages=advantages[rows],
            response_mask=mask[rows],
            loss_agg_mode=mode_of_sum,
            config=actor,
        )
        (found,) = torch.autograd.grad(loss, logprobs)
        return found

    everything = slice(None)
    plain = gradient(everything, advantages)
    if difference(plain, gradient(everything, advantages, "token-mean")) == 0:
        return 1.0
    apart = torch.stack([weights[n] * gradient(slice(n, n + 1), advantages) for n in range(4)]).sum(0)
    return max(
        difference(gradient(everything, advantages * weights[:, None]), apart),
        difference(gradient(everything, advantages * 0.05), plain * 0.05),
    )


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
