"""What of verl's configuration agl decides, so that `train.verl` may not say it (pure).

A key that is MANAGED follows from a setting of agl; one that is UNUSED has no effect here, because agl's own part does
the work; one that is REFUSED would break what agl promises. A key above or below one of them is refused with it.
Everything else is the user's. A leading `+` adds a key that verl's files do not list, as in Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agl_runtime.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
SERVER = f"{ROLLOUT}.engine_kwargs.vllm"

MANAGED: Mapping[str, str] = {
    f"{MODEL}.path": "model.path",
    f"{SERVER}.served_model_name": "model.name",
    f"{SERVER}.override_generation_config": "model.max_tokens and train.temperature",
    f"{ROLLOUT}.max_model_len": "model.context",
    f"{ROLLOUT}.prompt_length": "train.max_prompt_tokens",
    f"{ROLLOUT}.response_length": "train.max_response_tokens",
    f"{ROLLOUT}.n": "train.group_size",
    f"{ROLLOUT}.temperature": "train.temperature",
    f"{ROLLOUT}.seed": "train.seed",
    f"{ROLLOUT}.val_kwargs.n": "eval.samples",
    f"{ROLLOUT}.val_kwargs.temperature": "eval.temperature",
    f"{ROLLOUT}.val_kwargs.do_sample": "eval.temperature",
    f"{ACTOR}.ppo_mini_batch_size": "train.mini_batches",
    f"{ACTOR}.ppo_epochs": "train.epochs",
    f"{ACTOR}.ppo_max_token_len_per_gpu": "train.token_budget",
    f"{ACTOR}.use_dynamic_bsz": "train.token_budget",
    f"{ACTOR}.ppo_micro_batch_size": "train.token_budget",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "train.token_budget",
    f"{ACTOR}.clip_ratio": "train.clip_low and train.clip_high",
    f"{ACTOR}.clip_ratio_low": "train.clip_low",
    f"{ACTOR}.clip_ratio_high": "train.clip_high",
    f"{ACTOR}.loss_agg_mode": "train.normalization",
    f"{ACTOR}.optim.lr": "train.lr",
    f"{ACTOR}.optim.betas": "train.betas",
    f"{ACTOR}.optim.weight_decay": "train.weight_decay",
    f"{ACTOR}.optim.clip_grad": "train.max_grad_norm",
    f"{ACTOR}.grad_clip": "train.max_grad_norm",
    f"{ACTOR}.data_loader_seed": "train.seed",
    f"{ROLLOUT}.enable_rollout_routing_replay": "train.routing_replay",
    f"{ACTOR}.megatron.router_replay": "train.routing_replay",
    f"{ACTOR}.veomni.router_replay": "train.routing_replay",
    "algorithm.adv_estimator": "train.algorithm",
    "algorithm.norm_adv_by_std_in_grpo": "train.algorithm (dr_grpo does not divide)",
    "algorithm.agl": "train.normalization",
    "algorithm.use_kl_in_reward": "train.kl_coef",
    "algorithm.kl_penalty": "train.kl_coef",
    "algorithm.kl_ctrl": "train.kl_coef",
    f"{ACTOR}.use_kl_loss": "train.kl_coef",
    "algorithm.rollout_correction.rollout_is": "train.tis_cap",
    "algorithm.rollout_correction.rollout_is_threshold": "train.tis_cap",
    "data.train_files": "data.train",
    "data.val_files": "data.val",
    "data.train_batch_size": "train.groups_per_step",
    "data.max_prompt_length": "train.max_prompt_tokens",
    "data.max_response_length": "train.max_response_tokens",
    "data.seed": "train.seed",
    "reward": "reward.function",
    "trainer.nnodes": "train.nodes",
    "trainer.n_gpus_per_node": "train.gpus",
    "trainer.device": "train.device",
    "trainer.logger": "train.trackers",
    "trainer.total_training_steps": "train.steps",
    "trainer.total_epochs": "train.steps",
    "trainer.save_freq": "train.save_every",
    "trainer.max_actor_ckpt_to_keep": "train.keep_checkpoints",
    "trainer.test_freq": "eval.every",
    "trainer.val_before_train": "data.val",
    "trainer.v1.trainer_mode": "train.active_groups",
    "trainer.v1.sync": "train.active_groups",
    "trainer.v1.colocate_async": "train.active_groups",
    "trainer.v1.separate_async": "train.active_groups",
    "trainer.v1.sampler.max_off_policy_threshold": "train.max_staleness",
}
UNUSED = (
    f"{ROLLOUT}.name",
    f"{ROLLOUT}.agent",
    f"{ROLLOUT}.multi_turn",
    f"{ROLLOUT}.top_k",
    f"{ROLLOUT}.top_p",
    f"{ROLLOUT}.val_kwargs.top_k",
    f"{ROLLOUT}.val_kwargs.top_p",
    f"{ROLLOUT}.calculate_log_probs",
    f"{ROLLOUT}.logprobs_mode",
    "actor_rollout_ref.hybrid_engine",
    "algorithm.filter_groups",
    "critic",
    "data",
    "distillation",
    "reward.num_workers",
    "skip",
    "trainer.balance_batch",
    "trainer.checkpoint_callback_class",
    "trainer.critic_warmup",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
    "trainer.resume_mode",
    "trainer.use_v1",
    "trainer.v1.sampler",
    "trainer.val_only",
    "transfer_queue.enable",
)
_UNWEIGHTED = "verl would add it up over all tokens, whatever train.normalization says"
REFUSED: Mapping[str, str] = {
    f"{ACTOR}.entropy_coeff": _UNWEIGHTED,
    "algorithm.rollout_correction.bypass_mode": "the weights before the update are recomputed, as train.tis_cap needs",
    "ray_kwargs.ray_init.runtime_env.env_vars": "it would stand in logs and trackers; your shell's variables reach Ray",
    f"{ACTOR}.shuffle": "mini-batches would no longer weigh rollouts equally",
}
_SECRET = re.compile(r"(api_key|hf_token|password|secret)$")
_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@]+@")
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
# Linear in the advantage token by token and added up by `loss_agg_mode`, so that the weights folded into the
# advantages come out as weights of the loss. verl's other losses average by themselves or look across the batch.
EXACT_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "gpg", "cispo")


def passed_through(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`train.verl` as dotted keys with plain values, a leading `+` kept. Raises ConfigError for what is not the user's
    to set."""
    found = _flat(settings)
    for key, value in found.items():
        _require_own(key.lstrip("+"), value)
    return found


def decider(key: str, value: Any, settings: Mapping[str, Any]) -> str:
    """What decides that a key of verl has this value: a setting of agl by its name, `train.verl` (`settings`), or agl
    itself."""
    if (key, value) in ((name.lstrip("+"), said) for name, said in _flat(settings).items()):
        return "train.verl"
    return MANAGED.get(_touched(key), "agl")


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        mark = "+" if key.startswith("+") or prefix.startswith("+") else ""
        path = f"{mark}{prefix.lstrip('+')}{key.lstrip('+')}"
        found |= _flat(item, f"{path}.") if isinstance(item, Mapping) and item else {path: item}
    return found


def _require_own(key: str, value: object) -> None:
    said, name = f"train.verl sets {key}", _touched(key)
    if name.startswith(f"{key}."):
        raise ConfigError(f"{said} as a whole, and agl manages {name} in it.", "Name what you set in it.")
    if name in MANAGED:
        raise ConfigError(f"{said}, which agl manages.", f"Set {MANAGED[name]} instead.")
    if name in UNUSED:
        raise ConfigError(f"{said}, which agl manages.", "Remove it: agl's own part does this.")
    if name in REFUSED:
        raise ConfigError(f"{said}: {REFUSED[name]}.", "Remove it.")
    if _SECRET.search(key) or _PASSWORD.search(str(value)):
        raise ConfigError(
            f"{said} to a secret, which would stand in logs and trackers.",
            "Leave it out, and export what the program that wants it reads, such as HTTPS_PROXY or HF_TOKEN.",
        )
    if key == LOSS_MODE and value not in EXACT_LOSSES:
        raise ConfigError(
            f"{said} to {value}, whose average train.normalization could not decide.",
            f"Use one of {', '.join(EXACT_LOSSES)}.",
        )


def _touched(key: str) -> str:
    """The longest name that is `key` or above it, else the first below it, else an empty one."""
    names = (*MANAGED, *UNUSED, *REFUSED)
    above = [name for name in names if f"{key}.".startswith(f"{name}.")]
    return max(above, key=len) if above else next((name for name in names if name.startswith(f"{key}.")), "")
