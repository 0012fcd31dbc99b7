from __future__ import annotations

from typing import Any

import pytest

from agl_runtime.errors import ConfigError
from agl_runtime.trainer.backends.verl.managed import decider, passed_through


def test_nested_and_dotted_names_are_one():
    nested = {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "cispo"}}, "model.use_liger": True}}
    assert passed_through(nested) == {
        "actor_rollout_ref.actor.policy_loss.loss_mode": "cispo",
        "actor_rollout_ref.model.use_liger": True,
    }


def test_a_plus_stays_in_front_wherever_it_stands():
    assert passed_through({"+actor_rollout_ref.model": {"new": 1}, "trainer": {"+other": 2}}) == {
        "+actor_rollout_ref.model.new": 1,
        "+trainer.other": 2,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algorithm": {"adv_estimator": "grpo"}},
            r"train\.verl sets algorithm\.adv_estimator, which agl manages\. Set train\.algorithm instead\.",
        ),
        ({"+algorithm.adv_estimator": "grpo"}, r"sets algorithm\.adv_estimator, which agl manages"),
        ({"algorithm": "x"}, r"verl sets algorithm as a whole, and agl manages algorithm\.adv_estimator in it\. Name"),
        ({"actor_rollout_ref.actor.use_kl_loss": True}, r"which agl manages\. Set train\.kl_coef instead\."),
        ({"data.max_prompt_length": 3}, r"Set train\.max_prompt_tokens instead\."),
        ({"data.shuffle": True}, r"sets data\.shuffle, which agl manages\. Remove it: agl's own part does this\."),
        (
            {"actor_rollout_ref.actor.optim": None},
            r"sets actor_rollout_ref\.actor\.optim as a whole, and agl manages actor_rollout_ref\.actor\.optim\.lr ",
        ),
        (
            {"critic": {"enable": True}},
            r"sets critic\.enable, which agl manages\. Remove it: agl's own part does this\.",
        ),
        (
            {"actor_rollout_ref.actor.entropy_coeff": 0.1},
            r"sets actor_rollout_ref\.actor\.entropy_coeff: verl would add it up over all tokens",
        ),
        (
            {"ray_kwargs.ray_init.runtime_env": {"env_vars": {"WANDB_API_KEY": "s3cret"}}},
            r"env_vars\.WANDB_API_KEY: it would stand in logs and trackers; your shell's variables reach Ray\. Remove",
        ),
        (
            {"+trainer.wandb_proxy": "http://me:s3cret@proxy:80"},
            r"^train\.verl sets trainer\.wandb_proxy to a secret, which would stand in logs and trackers\. Leave ",
        ),
        (
            {"actor_rollout_ref.rollout.engine_kwargs.vllm.hf_token": "s3cret"},
            r"^train\.verl sets \S+\.hf_token to a secret, which [^3]+ such as HTTPS_PROXY or HF_TOKEN\.$",
        ),
        (
            {"actor_rollout_ref.actor.policy_loss.loss_mode": "sapo"},
            r"loss_mode to sapo, whose average train\.normalization could not decide\. Use one of vanilla,",
        ),
    ],
)
def test_what_agl_decides_is_refused_and_the_setting_named(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        passed_through(settings)


def test_what_only_begins_alike_is_not_refused():
    assert passed_through({"actor_rollout_ref.rollout.name_of_it": 1, "database": 2})
    assert passed_through({"+trainer.wandb_proxy": "http://proxy:80"})


@pytest.mark.parametrize(
    ("key", "value", "origin"),
    [
        ("data.max_prompt_length", 8192, "train.max_prompt_tokens"),
        ("data.max_response_length", 8192, "train.max_response_tokens"),
        ("data.seed", 0, "train.seed"),
        ("data.train_batch_size", 4, "train.groups_per_step"),
        ("data.train_files", "train:setup.json", "data.train"),
        ("data.shuffle", False, "agl"),
        ("data.custom_cls.name", "TaskDataset", "agl"),
        ("reward.num_workers", 1, "agl"),
        ("trainer.v1.sampler.max_off_policy_threshold", 5, "train.max_staleness"),
        ("trainer.v1.sampler.custom_sampler.name", "GroupSampler", "agl"),
        ("algorithm.kl_ctrl.kl_coef", 0.0, "train.kl_coef"),
        ("actor_rollout_ref.rollout.free_cache_engine", True, "train.verl"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", False, "agl"),
    ],
)
def test_what_decides_a_value_is_named(key: str, value: Any, origin: str):
    said = {"+actor_rollout_ref": {"rollout.free_cache_engine": True, "actor.fsdp_config.param_offload": True}}
    assert decider(key, value, said) == origin
