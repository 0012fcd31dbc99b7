"""From agl's configuration to verl's (pure; imports neither verl nor Ray nor torch).

Three layers, the later over the earlier: what agl proposes where verl's default does not suit, `train.verl`, and what
agl's own settings decide. The first and the last never meet `train.verl` in doubt: a key of the last is refused there
(`managed.py`). What no layer names is verl's default.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_runtime.config import Config, Project
from agl_runtime.errors import ConfigError
from agl_runtime.trainer.backends.verl.families import Family
from agl_runtime.trainer.backends.verl.managed import ACTOR, MODEL, ROLLOUT, SERVER, passed_through
from agl_runtime.trainer.backends.verl.setup import CHECKPOINTS, SETUP_FILE, run_folder
from agl_runtime.trainer.checks import policy_folder
from agl_runtime.trainer.schedule import validation_due

PACKAGE = "agl_runtime.trainer.backends.verl"
MANAGER = f"{PACKAGE}.manager.GatewayManager"
DATASET = (f"pkg://{PACKAGE}.dataset", "TaskDataset")
SAMPLER = (f"pkg://{PACKAGE}.sampler", "GroupSampler")
CHECKPOINT_CALLBACK = f"{PACKAGE}.checkpoint.CheckpointCommit"
REPLAY = f"{PACKAGE}.replay"
ESTIMATOR_PREFIX = "rollout_"
CPU_ROLLOUT = "agl_embedded"
CPU_SEQUENCES = 64
PADDING_ROW_TOKENS = 128  # of the rows that verl adds to fill a batch
NO_DUAL_CLIP = 1e9  # past the largest ratio that verl computes, e^20


@dataclass(frozen=True, slots=True)
class Paths:
    """What the launcher knows and the configuration does not. `policy` is the Hugging Face folder to start from;
    `checkpoints` where verl writes `global_step_N`; `resume_from` such a folder, None for a new run; `setup` the file
    that agl's pieces read; `validates`: there are validation tasks; `run_name` is what trackers call the run; `step` is
    that of `resume_from`, and `validated` that of the last validation."""

    policy: Path
    checkpoints: Path
    setup: Path
    validates: bool
    run_name: str = "agl"
    resume_from: Path | None = None
    step: int = 0
    validated: int = -1

    @classmethod
    def of(cls, project: Project, run_id: str = "RUN") -> Paths:
        """Where a run of the project has them. Raises ConfigError where something is missing."""
        if not project.config.data.train:
            raise ConfigError("There are no training tasks.", "Set data.train in agl.yaml to a JSON Lines file.")
        folder = run_folder(project, run_id)
        return cls(
            policy=policy_folder(project),
            checkpoints=folder / CHECKPOINTS,
            setup=folder / SETUP_FILE,
            validates=bool(project.config.data.val),
            run_name=run_id,
        )


def overrides(config: Config, paths: Paths, family: Family, *, on_cpu: bool) -> dict[str, Any]:
    """verl's configuration by dotted keys with plain values; `model_engine` is Hydra's choice of files, and a leading
    `+` adds a key that verl's files do not list (`compose.py`). Raises ConfigError for a `train.verl` that agl cannot
    let through."""
    user = passed_through(config.train.verl)
    decided = _algorithm(config) | _actor(config, family) | _rollout(config, family, on_cpu=on_cpu)
    decided |= _data(config, paths) | _trainer(config, paths, on_cpu=on_cpu) | _schedule(config)
    decided |= _replay(family, user, on_cpu=on_cpu) if config.train.routing_replay else {}
    layers = [
        _proposed(user),
        {} if on_cpu else _parsers(family),
        user,
        decided,
        for_cpu(config, user) if on_cpu else {},
    ]
    return _merged(layers) | {f"{MODEL}.path": str(paths.policy), "critic.enable": False}


def _merged(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last of a key counts, with or without its `+`."""
    last = {key.lstrip("+"): (key, value) for layer in layers for key, value in layer.items()}
    return dict(last.values())


def _proposed(user: Mapping[str, Any]) -> dict[str, Any]:
    """Better beginnings than verl's, for the user to change."""
    # `sdpa` keeps packed samples apart as well, and needs no package to be built.
    fsdp = {f"{ACTOR}.strategy": "fsdp2", f"{MODEL}.override_config.attn_implementation": "sdpa"}
    return (fsdp if user.get("model_engine", "dp") == "dp" else {}) | {
        "trainer.project_name": "agl",
        f"{ACTOR}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{ACTOR}.clip_ratio_c": NO_DUAL_CLIP,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
    }


def _parsers(family: Family) -> dict[str, Any]:
    tools = {f"{SERVER}.enable_auto_tool_choice": True, f"{SERVER}.tool_call_parser": family.tool_parser}
    return (tools if family.tool_parser else {}) | (
        {f"{SERVER}.reasoning_parser": family.reasoning_parser} if family.reasoning_parser else {}
    )


def _algorithm(config: Config) -> dict[str, Any]:
    train = config.train
    return {
        "algorithm.adv_estimator": f"{ESTIMATOR_PREFIX}{train.algorithm}",
        "+algorithm.agl": {"normalization": train.normalization, "mini_batches": train.mini_batches},
        "algorithm.use_kl_in_reward": train.kl_coef > 0,
        "algorithm.kl_penalty": "k1",
        "algorithm.kl_ctrl.type": "fixed",
        "algorithm.kl_ctrl.kl_coef": train.kl_coef,
        "algorithm.rollout_correction.rollout_is": None if train.tis_cap is None else "token",
        "algorithm.rollout_correction.rollout_is_threshold": train.tis_cap or 2.0,
    }


def _actor(config: Config, family: Family) -> dict[str, Any]:
    train = config.train
    return {
        f"{ACTOR}.ppo_mini_batch_size": max(1, train.groups_per_step // train.mini_batches),
        f"{ACTOR}.ppo_epochs": train.epochs,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": max(train.token_budget, longest_row(config, family), PADDING_ROW_TOKENS),
        f"{ACTOR}.clip_ratio_low": train.clip_low,
        f"{ACTOR}.clip_ratio_high": train.clip_high,
        f"{ACTOR}.loss_agg_mode": "token-sum",
        f"{ACTOR}.data_loader_seed": train.seed,
        f"{ACTOR}.optim.lr": train.lr,
        f"{ACTOR}.optim.betas": list(train.betas),
        f"{ACTOR}.optim.weight_decay": train.weight_decay,
        f"{ACTOR}.optim.clip_grad": train.max_grad_norm,
    }


def longest_row(config: Config, family: Family) -> int:
    """Most tokens of a training sample."""
    longest = config.train.max_prompt_tokens + config.train.max_response_tokens
    return min(longest, config.model.context or family.context or longest)


def _rollout(config: Config, family: Family, *, on_cpu: bool) -> dict[str, Any]:
    train, model = config.train, config.model
    if model.context and family.context and model.context > family.context:
        raise ConfigError(
            f"model.context is {model.context}, and the model itself takes {family.context} tokens.",
            "Lower model.context, or change the model's config.json.",
        )
    generation = {"temperature": train.temperature, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0}
    server = {
        f"{SERVER}.served_model_name": model.name,
        f"{SERVER}.override_generation_config": json.dumps(generation | {"max_new_tokens": model.max_tokens}),
    }
    return ({} if on_cpu else server) | {
        f"{ROLLOUT}.name": CPU_ROLLOUT if on_cpu else "vllm",
        f"+{ROLLOUT}.agent.agent_loop_manager_class": MANAGER,
        f"{ROLLOUT}.n": train.group_size,
        f"{ROLLOUT}.temperature": train.temperature,
        f"{ROLLOUT}.max_model_len": model.context or family.context,
        f"{ROLLOUT}.seed": train.seed,
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.logprobs_mode": "processed_logprobs",
        f"{ROLLOUT}.val_kwargs.n": config.eval.samples,
        f"{ROLLOUT}.val_kwargs.temperature": config.eval.temperature,
        f"{ROLLOUT}.val_kwargs.do_sample": config.eval.temperature > 0,
    }


def _data(config: Config, paths: Paths) -> dict[str, Any]:
    """The order of the tasks is the data set's own, so verl does not shuffle."""
    return {
        "data.train_files": f"train:{paths.setup}",
        "data.val_files": f"val:{paths.setup}",
        "data.custom_cls.path": DATASET[0],
        "data.custom_cls.name": DATASET[1],
        "data.train_batch_size": config.train.groups_per_step,
        "data.gen_batch_size": 1,
        "data.max_prompt_length": config.train.max_prompt_tokens,
        "data.max_response_length": config.train.max_response_tokens,
        "data.shuffle": False,
        "data.seed": config.train.seed,
        "data.dataloader_num_workers": 0,
        "reward.num_workers": 1,  # verl starts them whatever gives the reward; they do nothing
    }


def _trainer(config: Config, paths: Paths, *, on_cpu: bool) -> dict[str, Any]:
    train, every = config.train, config.eval.every
    return {
        "trainer.device": "cpu" if on_cpu else "cuda",
        "trainer.n_gpus_per_node": train.gpus,
        "trainer.nnodes": train.nodes,
        "trainer.experiment_name": paths.run_name,
        "trainer.logger": [*train.trackers, "file"],
        "trainer.total_training_steps": train.steps,
        "trainer.total_epochs": 1,
        "trainer.save_freq": train.save_every,
        "trainer.v1.sampler.sampler_kwargs": {"setup": str(paths.setup)},
        "trainer.test_freq": (every or train.steps) if paths.validates else -1,
        "trainer.val_before_train": paths.validates and validation_due(paths.step, paths.validated, train.steps, every),
        "trainer.val_only": paths.step >= train.steps,  # all that is left, where a run ended before its last validation
        "trainer.default_local_dir": str(paths.checkpoints),
        "trainer.resume_mode": "resume_path" if paths.resume_from else "disable",
        "trainer.resume_from_path": str(paths.resume_from) if paths.resume_from else None,
        "trainer.checkpoint_callback_class": CHECKPOINT_CALLBACK,
    }


def _schedule(config: Config) -> dict[str, Any]:
    train = config.train
    active = train.active_groups or train.groups_per_step
    values: dict[str, Any] = {
        "trainer.v1.trainer_mode": "sync" if active == train.groups_per_step else "colocate_async",
        "trainer.v1.sampler.max_off_policy_threshold": None if train.max_staleness is None else train.max_staleness + 1,
        "trainer.v1.sampler.max_off_policy_strategy": "drop",
        "trainer.v1.sampler.custom_sampler.path": SAMPLER[0],
        "trainer.v1.sampler.custom_sampler.name": SAMPLER[1],
    }
    if active > train.groups_per_step:
        values["trainer.v1.colocate_async.num_warmup_batches"] = _batches(
            active - train.groups_per_step, train.groups_per_step
        )
    return values


def _replay(family: Family, user: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """verl's FSDP engine gets it from `replay.py`, its others have it."""
    engine, lib = user.get("model_engine", "dp"), f"{MODEL}.external_lib"
    off = "Set train.routing_replay to false."
    if family.routing is None:
        raise ConfigError("train.routing_replay is for a Mixture-of-Experts, and the model is none.", off)
    if on_cpu:
        raise ConfigError("train.routing_replay needs model servers that tell their experts, as vLLM on a GPU.", off)
    if engine != "dp":
        return {f"{ROLLOUT}.enable_rollout_routing_replay": True, f"{ACTOR}.{engine}.router_replay.mode": "R3"}
    if lib in user:
        raise ConfigError(f"train.verl sets {lib}, where agl's routing replay for FSDP stands.", off)
    return {f"{ROLLOUT}.enable_rollout_routing_replay": True, lib: REPLAY}


def _batches(groups: int, batch: int) -> float:
    """`groups` in batches. verl rounds what it multiplies back down, so the quotient must not be a hair too small."""
    quotient = groups / batch
    return quotient if math.floor(quotient * batch) == groups else math.nextafter(quotient, math.inf)


def for_cpu(config: Config, user: Mapping[str, Any]) -> dict[str, Any]:
    """verl on processes that compute in fp32 on the CPU, for trying out. Raises ConfigError for what needs GPUs."""
    if user.get("model_engine", "dp") != "dp":
        raise ConfigError(
            f"train.verl sets model_engine to {user['model_engine']}, which needs GPUs.",
            "Use a machine with GPUs, or remove it.",
        )
    if config.train.kl_coef:
        raise ConfigError(
            "train.kl_coef needs GPUs with the verl backend, which keeps the reference policy in pinned memory.",
            "Use a machine with GPUs, set train.kl_coef to 0, or train.backend to embedded.",
        )
    return {
        f"{ACTOR}.strategy": "fsdp2",
        f"{ACTOR}.use_torch_compile": False,
        f"{ACTOR}.fsdp_config.use_torch_compile": False,
        f"{ACTOR}.fsdp_config.model_dtype": "fp32",
        f"+{ACTOR}.fsdp_config.mixed_precision": {
            "param_dtype": "fp32",
            "reduce_dtype": "fp32",
            "buffer_dtype": "fp32",
        },
        f"{ACTOR}.fsdp_config.param_offload": False,
        f"{ACTOR}.fsdp_config.optimizer_offload": False,
        f"{MODEL}.enable_activation_offload": False,
        f"{MODEL}.use_fused_kernels": False,
        f"{MODEL}.use_remove_padding": False,
        f"{MODEL}.override_config.attn_implementation": "sdpa",
        f"{ROLLOUT}.dtype": "float32",
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"+{ROLLOUT}.engine_kwargs.{CPU_ROLLOUT}": {
            "model": config.model.name,
            "max_tokens": config.model.max_tokens,
            "max_batch": CPU_SEQUENCES,
            "seed": config.train.seed,
        },
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
