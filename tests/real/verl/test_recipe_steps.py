"""Each FSDP recipe takes a real step of verl on the CPU, with its own training settings; model, lengths, batch, agent
and task are the example's. The Megatron recipe needs GPUs: `test_recipes.py` has verl's own validation of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes import recipes
from fakes.verl_run import VerlRun


@pytest.mark.parametrize("recipe", recipes.FSDP)
def test_a_recipe_takes_a_real_step(recipe: str, tmp_path: Path) -> None:
    run = VerlRun(tmp_path / "recipe", recipes.small(recipe), validated=2)
    assert run.up() == 0, run.said
    (step,) = run.steps()
    assert step["version"] == "1.1"
    assert step["grad_norm"] > 0
    train = recipes.load(recipe).config.train
    for told in (f"'adv_estimator': 'rollout_{train.algorithm}'", "'trainer_mode': 'colocate_async'"):
        assert told in run.log()
    assert f"'clip_ratio_high': {train.clip_high}" in run.log()
