"""verl's own reading of every recipe: Hydra composes its files with agl's overrides, and its validation passes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from fakes import recipes
from fakes.verl import verl_python

RUNTIME = Path(__file__).parents[3] / "runtime"
VALIDATE = """
import json, sys
from agl_runtime.trainer.backends.verl.compose import compose
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

found = {}
for name, values in json.load(sys.stdin).items():
    config = compose(values)
    validate_config(config, need_reference_policy(config), need_critic(config))
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    found[name] = [actor.strategy, actor.engine.router_replay.mode, actor.policy_loss.loss_mode,
                   rollout.engine_kwargs["vllm"]["tool_call_parser"]]
json.dump(found, open(sys.argv[1], "w"))
"""
WRONG = """
import sys
from agl_runtime.errors import ConfigError
from agl_runtime.trainer.backends.verl.compose import compose

known = {"actor_rollout_ref.rollout.engine_kwargs.vllm.anything": 1, "+trainer.added": 2}
config = compose(known)
assert (config.actor_rollout_ref.rollout.engine_kwargs.vllm.anything, config.trainer.added) == (1, 2)
for wrong in (
    {"trainer.added": 2, "actor_rollout_ref.actor.strategie": "fsdp"},
    {"actor_rollout_ref.rollout.gpu_memory_utilization": "much"},
    {"model_engine": "deepspeed"},
):
    try:
        compose(wrong)
    except ConfigError as error:
        print(error)
print(sorted({"torch", "ray", "verl"} & set(sys.modules)))
"""
REFUSED = """
from agl_runtime.errors import ConfigError
from agl_runtime.trainer.backends.verl.compose import compose
from agl_runtime.trainer.backends.verl.launch import validate

try:
    validate(compose({"+actor_rollout_ref.actor.nosuch": 1, "actor_rollout_ref.rollout.name": "vllm"}))
except ConfigError as error:
    print(error)
"""


def in_verl(code: str, *words: str, stdin: str = "") -> str:
    env = os.environ | {"PYTHONPATH": str(RUNTIME), "OMP_NUM_THREADS": "1"}
    command = [str(verl_python()), "-W", "ignore", "-c", code, *words]
    done = subprocess.run(command, input=stdin, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    file = tmp_path_factory.mktemp("verl") / "found.json"
    in_verl(VALIDATE, str(file), stdin=json.dumps({size: recipes.told(size) for size in recipes.SIZES}))
    return dict(json.loads(file.read_text(encoding="utf-8")))


def test_verl_accepts_every_recipe(accepted: dict[str, list[str]]):
    fsdp = ["fsdp2", "disabled", "vanilla", "hermes"]
    assert {size: fsdp for size in recipes.SIZES} | {
        "swe-qwen3.5-35b-a3b": ["megatron", "R3", "cispo", "hermes"]
    } == accepted


def test_what_does_not_fit_verls_files_is_told_without_an_import_of_verl():
    assert in_verl(WRONG).splitlines() == [
        "train.verl sets trainer.added, which verl does not know, and actor_rollout_ref.actor.strategie, which verl "
        "does not know (it knows strategy). Correct it, or put a + before a name to add it.",
        "train.verl sets actor_rollout_ref.rollout.gpu_memory_utilization to 'much', where verl has the number 0.5. "
        "Correct it, or put a + before a name to add it.",
        "train.verl sets model_engine to 'deepspeed'. Use one of dp, megatron, torchtitan, veomni.",
        "[]",
    ]


def test_what_verls_own_classes_refuse_is_an_error_of_configuration():
    said = in_verl(REFUSED).splitlines()[-1]
    assert said.startswith("verl refuses its settings: Error in call to target")
    assert "got an unexpected keyword argument 'nosuch'" in said
    assert said.endswith("Correct train.verl; `agl up --dry-run` lists all that verl is told.")
