from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.config import Config
from agl_runtime.errors import ConfigError
from agl_runtime.trainer.backends.verl.families import Family
from agl_runtime.trainer.backends.verl.settings import Paths, overrides

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
PATHS = Paths(Path("/policy"), Path("/run/checkpoints"), Path("/run/setup.json"), True, "mine")
FAMILY = Family("qwen3", "hermes", "qwen3", context=32768)


def made(*, on_cpu: bool = False, paths: Paths = PATHS, family: Family = FAMILY, **sections: Any) -> dict[str, Any]:
    train = {"backend": "verl"} | sections.pop("train", {})
    config = Config.model_validate({"agent": {"command": "run"}, "train": train, **sections})
    return overrides(config, paths, family, on_cpu=on_cpu)


def test_every_setting_that_verl_has_too_reaches_it():
    values = made(
        train={
            "algorithm": "opo",
            "groups_per_step": 12,
            "mini_batches": 3,
            "group_size": 4,
            "epochs": 2,
            "lr": 3e-5,
            "betas": (0.8, 0.9),
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "clip_low": 0.1,
            "clip_high": 0.3,
            "temperature": 0.7,
            "steps": 50,
            "save_every": 5,
            "keep_checkpoints": 2,
            "seed": 9,
            "gpus": 4,
            "nodes": 2,
            "normalization": "token",
            "max_prompt_tokens": 1000,
            "max_response_tokens": 3000,
            "token_budget": 6000,
            "trackers": ["console", "wandb"],
        },
        model={"context": 4000, "name": "mine", "max_tokens": 77},
        eval={"every": 10, "samples": 3, "temperature": 0.2},
    )
    expected = {
        "actor_rollout_ref.model.path": "/policy",
        "algorithm.adv_estimator": "rollout_opo",
        "+algorithm.agl": {"normalization": "token", "mini_batches": 3},
        f"{ACTOR}.ppo_mini_batch_size": 4,
        f"{ACTOR}.ppo_epochs": 2,
        f"{ACTOR}.loss_agg_mode": "token-sum",
        f"{ACTOR}.ppo_max_token_len_per_gpu": 6000,
        f"{ACTOR}.optim.lr": 3e-5,
        f"{ACTOR}.optim.betas": [0.8, 0.9],
        f"{ACTOR}.optim.weight_decay": 0.1,
        f"{ACTOR}.optim.clip_grad": 0.5,
        f"{ACTOR}.clip_ratio_low": 0.1,
        f"{ACTOR}.clip_ratio_high": 0.3,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": 4,
        f"{ROLLOUT}.temperature": 0.7,
        f"{ROLLOUT}.max_model_len": 4000,
        f"{ROLLOUT}.val_kwargs.n": 3,
        f"{ROLLOUT}.val_kwargs.temperature": 0.2,
        "data.train_batch_size": 12,
        "data.gen_batch_size": 1,
        "data.max_prompt_length": 1000,
        "data.max_response_length": 3000,
        "trainer.total_training_steps": 50,
        "trainer.save_freq": 5,
        "trainer.test_freq": 10,
        "trainer.n_gpus_per_node": 4,
        "trainer.nnodes": 2,
        "trainer.device": "cuda",
        "trainer.logger": ["console", "wandb", "file"],
        f"{ROLLOUT}.engine_kwargs.vllm.served_model_name": "mine",
    }
    assert {key: values[key] for key in expected} == expected
    assert {values[key] for key in ("data.seed", f"{ROLLOUT}.seed", f"{ACTOR}.data_loader_seed")} == {9}
    generation = json.loads(values[f"{ROLLOUT}.engine_kwargs.vllm.override_generation_config"])
    assert (generation["temperature"], generation["max_new_tokens"]) == (0.7, 77)


def test_one_batch_under_way_is_synchronous():
    values = made(train={"groups_per_step": 8})
    assert values["trainer.v1.trainer_mode"] == "sync"
    assert not [key for key in values if "colocate" in key]


@pytest.mark.parametrize(("batch", "active"), [(8, 12), (49, 50), (3, 10), (7, 8), (16, 64), (98, 99), (107, 191)])
def test_more_groups_under_way_are_warmed_up_to_the_last_one(batch: int, active: int):
    values = made(train={"groups_per_step": batch, "active_groups": active})
    assert values["trainer.v1.trainer_mode"] == "colocate_async"
    warmup = values["trainer.v1.colocate_async.num_warmup_batches"]
    assert math.floor(warmup * batch) == active - batch  # as verl reckons


@pytest.mark.parametrize(("staleness", "threshold"), [(0, 1), (4, 5), (None, None)])
def test_verl_counts_the_weights_that_a_group_spans(staleness: int | None, threshold: int | None):
    values = made(train={"max_staleness": staleness})
    assert values["trainer.v1.sampler.max_off_policy_threshold"] == threshold


def test_stale_tokens_are_corrected_up_to_the_cap():
    key = "algorithm.rollout_correction.rollout_is"
    capped, none = made(train={"tis_cap": 3.0}), made(train={"tis_cap": None})
    assert (capped[key], capped[f"{key}_threshold"]) == ("token", 3.0)
    assert none[key] is None


def test_the_token_budget_holds_a_sample_of_full_length():
    key = f"{ACTOR}.ppo_max_token_len_per_gpu"
    long = {"max_prompt_tokens": 9000, "max_response_tokens": 9000, "token_budget": 100}
    assert made(train=long)[key] == 18000
    assert made(train=long, model={"context": 5000})[key] == 5000


def test_the_token_budget_holds_the_rows_that_verl_adds():
    short = {"max_prompt_tokens": 30, "max_response_tokens": 30, "token_budget": 60}
    assert made(train=short)[f"{ACTOR}.ppo_max_token_len_per_gpu"] == 128


def test_a_kl_penalty_reaches_the_estimator_through_the_reward():
    values = made(train={"kl_coef": 0.02})
    assert values["algorithm.use_kl_in_reward"] is True
    assert (values["algorithm.kl_penalty"], values["algorithm.kl_ctrl.type"]) == ("k1", "fixed")
    assert values["algorithm.kl_ctrl.kl_coef"] == 0.02
    assert made()["algorithm.use_kl_in_reward"] is False


def test_a_kl_penalty_needs_gpus():
    with pytest.raises(ConfigError, match=r"train\.kl_coef needs GPUs with the verl backend, .* pinned memory\. Use a"):
        made(on_cpu=True, train={"kl_coef": 0.02})


def test_without_validation_tasks_nothing_is_validated():
    values = made(paths=Paths(Path("/p"), Path("/c"), Path("/s"), False))
    assert (values["trainer.test_freq"], values["trainer.val_before_train"]) == (-1, False)


def test_validation_first_and_last_only_is_verls_last_step():
    values = made(train={"steps": 30})
    assert (values["trainer.test_freq"], values["trainer.val_before_train"]) == (30, True)


def resumed(step: int, validated: int, every: int = 0) -> tuple[bool, bool]:
    """Whether a run of 6 steps validates first, and whether it does nothing else."""
    paths = replace(PATHS, resume_from=Path(f"/c/global_step_{step}"), step=step, validated=validated)
    values = made(paths=paths, train={"steps": 6}, eval={"every": every})
    assert values["trainer.resume_mode"] == "resume_path"
    assert values["trainer.resume_from_path"] == f"/c/global_step_{step}"
    return values["trainer.val_before_train"], values["trainer.val_only"]


def test_a_resumed_run_validates_first_only_where_the_one_before_was_kept_from_it():
    assert resumed(3, validated=0) == (False, False)
    assert resumed(4, validated=2, every=2) == (True, False)
    assert resumed(4, validated=4, every=2) == (False, False)
    assert resumed(6, validated=0) == (True, True)


def test_the_servers_parse_as_the_family_writes():
    server = f"{ROLLOUT}.engine_kwargs.vllm"
    values = made()
    assert values[f"{server}.tool_call_parser"] == "hermes"
    assert values[f"{server}.enable_auto_tool_choice"] is True
    assert values[f"{server}.reasoning_parser"] == "qwen3"
    unknown = made(family=Family("new"))
    assert not [key for key in unknown if "parser" in key or "tool_choice" in key]


def test_what_the_user_passes_beats_what_agl_proposes():
    values = made(
        train={
            "verl": {
                "actor_rollout_ref": {
                    "rollout": {
                        "tensor_model_parallel_size": 4,
                        "engine_kwargs": {"vllm": {"tool_call_parser": "pythonic"}},
                    }
                },
                "actor_rollout_ref.actor.clip_ratio_c": 3.0,
            }
        }
    )
    assert values[f"{ROLLOUT}.tensor_model_parallel_size"] == 4
    assert values[f"{ROLLOUT}.engine_kwargs.vllm.tool_call_parser"] == "pythonic"
    assert values[f"{ACTOR}.clip_ratio_c"] == 3.0


def test_no_package_need_be_built_to_begin():
    key = "actor_rollout_ref.model.override_config.attn_implementation"
    assert made()[key] == "sdpa"
    assert made(train={"verl": {key: "flash_attention_2"}})[key] == "flash_attention_2"
    assert key not in made(train={"verl": {"model_engine": "megatron"}})


def test_a_plus_does_not_give_a_key_twice():
    values = made(train={"verl": {f"+{ROLLOUT}.tensor_model_parallel_size": 2}})
    assert [key for key in values if key.endswith("tensor_model_parallel_size")] == [
        f"+{ROLLOUT}.tensor_model_parallel_size"
    ]


def test_without_a_gpu_verl_computes_in_fp32_on_our_engine():
    values = made(on_cpu=True, train={"gpus": 2})
    assert values[f"{ROLLOUT}.name"] == "agl_embedded"
    assert values["trainer.device"] == "cpu"
    assert values["trainer.n_gpus_per_node"] == 2
    assert values[f"+{ACTOR}.fsdp_config.mixed_precision"]["param_dtype"] == "fp32"
    assert [key for key in values if "engine_kwargs" in key] == [f"+{ROLLOUT}.engine_kwargs.agl_embedded"]


def test_megatron_needs_gpus():
    with pytest.raises(ConfigError, match=r"train\.verl sets model_engine to megatron, which needs GPUs\."):
        made(on_cpu=True, train={"verl": {"model_engine": "megatron"}})
    assert f"{ACTOR}.strategy" not in made(train={"verl": {"model_engine": "megatron"}})


def test_a_context_beyond_the_models_own_is_refused():
    with pytest.raises(ConfigError, match=r"model\.context is 40000, and the model itself takes 32768 tokens\."):
        made(model={"context": 40000})


def test_settings_import_neither_verl_nor_ray_nor_torch():
    check = (
        "import sys, agl_runtime.trainer.backends.verl.settings, agl_runtime.trainer.backends.verl.compose;"
        "sys.exit(any(name in sys.modules for name in ('verl', 'ray', 'torch', 'hydra', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


EXPERTS = Family("qwen3_moe", routing=(48, 8))
RECORDING = f"{ROLLOUT}.enable_rollout_routing_replay"


def test_routing_replay_is_verls_own_with_megatron_and_agls_engine_with_fsdp():
    own = {"routing_replay": True, "verl": {"model_engine": "megatron"}}
    megatron, fsdp = made(family=EXPERTS, train=own), made(family=EXPERTS, train={"routing_replay": True})
    lib = "actor_rollout_ref.model.external_lib"
    assert (megatron[RECORDING], megatron[f"{ACTOR}.megatron.router_replay.mode"], lib in megatron) == (
        True,
        "R3",
        False,
    )
    assert (fsdp[RECORDING], fsdp[lib]) == (True, "agl_runtime.trainer.backends.verl.replay")
    assert RECORDING not in made(family=EXPERTS)


@pytest.mark.parametrize(
    ("on_cpu", "family", "verl", "expected"),
    [
        (False, FAMILY, {}, r"train\.routing_replay is for a Mixture-of-Experts, and the model is none\. Set"),
        (True, EXPERTS, {}, r"train\.routing_replay needs model servers that tell their experts, as vLLM"),
        (False, EXPERTS, {"actor_rollout_ref.model.external_lib": "mine"}, r"sets .*external_lib, where agl"),
        (False, EXPERTS, {RECORDING: True}, r"which agl manages\. Set train\.routing_replay instead\."),
        (False, EXPERTS, {f"{ACTOR}.megatron.router_replay.mode": "R2"}, r"Set train\.routing_replay instead\."),
    ],
)  # fmt: skip
def test_routing_replay_that_could_not_be_is_refused(on_cpu: bool, family: Family, verl: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=expected):
        made(on_cpu=on_cpu, family=family, train={"routing_replay": True, "verl": verl})
