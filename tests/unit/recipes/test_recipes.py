from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agl_runtime.config import Config
from agl_runtime.trainer.backends.verl.settings import Paths, overrides
from fakes import recipes

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


def module(recipe: str, name: str) -> ModuleType:
    """Tests need no package of a recipe's own."""
    file = recipes.FOLDER / recipe / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{recipe}_{name}".replace(".", "_"), file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize("size", recipes.SIZES)
def test_every_recipe_gives_verl_its_settings(size: str):
    train, told = recipes.load(size).config.train, recipes.told(size)
    assert train.backend == "verl"
    assert told["trainer.v1.trainer_mode"] == "colocate_async"
    assert train.gpus % told[f"{ROLLOUT}.tensor_model_parallel_size"] == 0
    assert told[f"{ACTOR}.ppo_max_token_len_per_gpu"] >= train.max_prompt_tokens + train.max_response_tokens
    assert (train.groups_per_step * train.group_size) % (train.gpus * train.nodes) == 0


def test_every_folder_with_a_recipe_is_tested_and_complete():
    found = {file.parent.name for file in recipes.FOLDER.glob("*/agl.yaml")}
    assert found == {folder for folder, _ in recipes.SIZES.values()}
    for name in found:
        assert "agl export" in (recipes.FOLDER / name / "README.md").read_text(encoding="utf-8")
        ignored = (recipes.FOLDER / name / ".gitignore").read_text(encoding="utf-8").split()
        assert {".agl/", "models/", "*.jsonl"} <= set(ignored)  # also of a copy of the folder
        assert f"`{name}`" in (recipes.FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_readme_on_four_gpus_says_what_is_tested():
    text = (recipes.FOLDER / "math-qwen3-8b" / "README.md").read_text(encoding="utf-8")
    assert recipes.flags(text.splitlines()) == recipes.FOUR_GPUS


def test_the_mixture_of_experts_replays_routing_and_clips_by_cispo():
    told = recipes.told("swe-qwen3.5-35b-a3b")
    assert told["model_engine"] == "megatron"
    assert told[f"{ACTOR}.megatron.router_replay.mode"] == "R3"
    assert told[f"{ROLLOUT}.enable_rollout_routing_replay"] is True
    assert told[f"{ACTOR}.policy_loss.loss_mode"] == "cispo"


@pytest.mark.parametrize("recipe", recipes.FSDP)
def test_a_recipe_made_small_is_told_the_cpu(recipe: str, tmp_path: Path):
    config = Config.model_validate({"agent": {"command": "run"}, "train": recipes.small(recipe)})
    told = overrides(config, Paths(tmp_path, tmp_path, tmp_path, True), recipes.FAMILY, on_cpu=True)
    assert (told["trainer.device"], told["trainer.n_gpus_per_node"]) == ("cpu", 1)
    assert told[f"{ACTOR}.fsdp_config.param_offload"] is False
    assert told["actor_rollout_ref.model.use_fused_kernels"] is False
    assert config.train.lr == recipes.load(recipe).config.train.lr


@pytest.mark.parametrize(
    ("recipe", "printed", "answer", "expected"),
    [
        ("gsm8k-qwen2.5-1.5b", "so\nAnswer: $1,200.0\n", 1200.0, 1.0),
        ("gsm8k-qwen2.5-1.5b", "Answer: 3\nno, Answer: 4.", 3.0, 0.0),
        ("gsm8k-qwen2.5-1.5b", "Answer: **42**", 42.0, 1.0),
        ("gsm8k-qwen2.5-1.5b", "1200", 1200.0, 0.0),
        ("math-qwen3-8b", "**Answer: -12**", -12, 1.0),
        ("math-qwen3-8b", "Answer: 1,000", 1000, 1.0),
        ("math-qwen3-8b", "", 1, 0.0),
    ],
)
def test_the_last_answer_is_rewarded(recipe: str, printed: str, answer: float, expected: float):
    assert module(recipe, "reward").reward({"answer": answer}, {"stdout": printed}) == expected


@pytest.mark.parametrize(
    ("expression", "result"),
    [("2*(3+4)", "14"), ("1,000/8", "125.0"), ("9**9", "error: only"), ("x", "error: only"), ("1/0", "error: ")],
)
def test_the_calculator_reckons_numbers_only(expression: str, result: str):
    calculate = module("gsm8k-qwen2.5-1.5b", "agent").calculate
    assert calculate(json.dumps({"expression": expression})).startswith(result)
    assert calculate("no json").startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [('{"code": "print(6*7)"}', "42\n"), ('{"code": "1/0"}', "ZeroDivisionError"), ("{}", "no code: 'code'")],
)
def test_the_python_tool_answers_with_what_was_printed(arguments: str, printed: str):
    assert printed in module("math-qwen3-8b", "agent").run(arguments)


class Docker:
    """Plays `docker run`: what it was given, and what pytest would print."""

    def __init__(self, printed: str, code: int = 0) -> None:
        self.commands: list[list[str]] = []
        self._done = (code, printed)

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append([*command, options["input"]])
        return subprocess.CompletedProcess(command, *self._done, "no daemon")


@pytest.fixture
def repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., float]:
    def run(docker: Docker, patch: str = "diff") -> float:
        (tmp_path / "trajectory.json").write_text(json.dumps({"info": {"submission": patch}}), encoding="utf-8")
        monkeypatch.setattr(subprocess, "run", docker)
        task = {
            "tests_image": "tests:x",
            "files": ["tests/a b.py"],
            "must_pass": ["tests/a b.py::one", "tests/a b.py::two"],
        }
        return float(module("swe-qwen3.5-9b", "reward").reward(task, str(tmp_path)))

    return run


def test_a_repair_is_rewarded_when_all_tests_pass_that_should(repaired: Callable[..., float]):
    docker = Docker("PASSED tests/a b.py::one\nPASSED tests/a b.py::two\nFAILED tests/a b.py::three\n")
    assert repaired(docker) == 1.0
    (command,) = docker.commands
    assert (command[command.index("bash") - 1], command[-1]) == ("tests:x", "diff\n")
    assert "'tests/a b.py'" in command[-2]
    assert repaired(Docker("PASSED tests/a b.py::one\nFAILED tests/a b.py::two\n")) == 0.0


def test_without_a_patch_no_container_starts(repaired: Callable[..., float], tmp_path: Path):
    docker = Docker("")
    assert repaired(docker, "\n") == 0.0
    assert docker.commands == []
    (tmp_path / "trajectory.json").unlink()
    assert module("swe-qwen3.5-9b", "reward").reward({}, str(tmp_path)) == 0.0


def test_a_docker_that_fails_is_no_reward_of_zero(repaired: Callable[..., float]):
    with pytest.raises(RuntimeError, match="no daemon"):
        repaired(Docker("", code=125))
