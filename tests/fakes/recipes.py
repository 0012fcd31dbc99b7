"""The recipes, each in the sizes that its README names, and the same made small enough for a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from agl_runtime.config import Project, load_project
from agl_runtime.trainer.backends.verl.families import Family
from agl_runtime.trainer.backends.verl.settings import Paths, overrides

FOLDER = Path(__file__).parents[2] / "recipes"
FOUR_GPUS = {
    "train.gpus": "4",
    "train.groups_per_step": "32",
    "train.active_groups": "48",
    "train.verl.actor_rollout_ref.actor.fsdp_config.optimizer_offload": "true",
}
SIZES: dict[str, tuple[str, dict[str, str]]] = {
    "gsm8k-qwen2.5-1.5b": ("gsm8k-qwen2.5-1.5b", {}),
    "math-qwen3-8b": ("math-qwen3-8b", {}),
    "math-qwen3-8b on four": ("math-qwen3-8b", FOUR_GPUS),
    "math-qwen3-8b on two nodes": ("math-qwen3-8b", {"train.nodes": "2"}),
    "swe-qwen3.5-9b": ("swe-qwen3.5-9b", {}),
    "swe-qwen3.5-35b-a3b": ("swe-qwen3.5-35b-a3b", {}),
}
FSDP = ("gsm8k-qwen2.5-1.5b", "math-qwen3-8b", "swe-qwen3.5-9b")
FAMILY = Family("qwen3", "hermes", "qwen3", context=262_144, routing=(40, 8))
SMALL = {
    "gpus": 1,
    "nodes": 1,
    "device": "cpu",
    "steps": 1,
    "groups_per_step": 2,
    "active_groups": 3,
    "group_size": 4,
    "max_prompt_tokens": 512,
    "max_response_tokens": 512,
    "token_budget": 1024,
    "save_every": 1,
    "trackers": ["console"],
}


def load(size: str) -> Project:
    folder, flags = SIZES[size]
    return load_project(FOLDER / folder, overrides=flags, environ={})


def told(size: str) -> dict[str, Any]:
    """What verl is told on GPUs."""
    paths = Paths(Path("/policy"), Path("/checkpoints"), Path("/setup.json"), True)
    return overrides(load(size).config, paths, FAMILY, on_cpu=False)


def small(recipe: str) -> dict[str, Any]:
    """The recipe's section `train`, whose lengths, batch and device fit a tiny model on a CPU."""
    written = yaml.safe_load((FOLDER / recipe / "agl.yaml").read_text(encoding="utf-8"))
    return {**written["train"], **SMALL}


def flags(lines: Iterable[str]) -> dict[str, str]:
    """`--set` in the text of a README."""
    words = " ".join(lines).split()
    return dict(words[n + 1].split("=", 1) for n, word in enumerate(words) if word == "--set")
