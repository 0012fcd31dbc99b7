"""`agl up` with real verl, gateway, controller and agents: the example learns, through a kill -9 in its midst."""

from __future__ import annotations

from pathlib import Path

import torch

from fakes.verl_run import KILLED_AFTER, UPDATES, VerlRun


def test_the_reward_rises_from_a_quarter_to_over_sixty_percent(run: VerlRun) -> None:
    before, after = run.summary["before"], run.summary["after"]
    assert before["pass_at_1"] < 0.45
    assert after["pass_at_1"] > 0.6
    assert (run.summary["ended"], run.summary["steps"]) == ("complete", UPDATES)


def test_every_step_is_there_once_and_the_second_process_made_the_later_ones(run: VerlRun) -> None:
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(1, UPDATES + 1))
    epochs = [int(step["version"].split(".")[0]) for step in steps]
    assert epochs[: KILLED_AFTER - 1] == [1] * (KILLED_AFTER - 1)
    assert epochs[-1] == 2


def test_what_the_engine_served_are_the_trainers_weights(run: VerlRun) -> None:
    """Of batches in which nothing is stale; the first of each process is one."""
    gaps = [step["logprob_gap"] for step in run.steps() if not step["staleness_max"]]
    assert gaps
    assert max(gaps) < 1e-4


def test_groups_carried_over_and_none_was_too_stale(run: VerlRun) -> None:
    assert 1 <= max(step["staleness_max"] for step in run.steps()) <= 4


def test_no_call_was_cut_short(run: VerlRun) -> None:
    assert all(step["untrained"] == {} for step in run.steps())
    assert "cut short" not in run.log()


def test_no_rollout_was_trained_twice(run: VerlRun) -> None:
    trained = run.trained()
    assert len(trained) >= UPDATES * 4 * 8
    assert len(trained) == len(set(trained))


def test_the_last_checkpoint_exports_to_a_folder_that_loads(run: VerlRun, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert run.agl("export", str(tmp_path / "policy")) == 0, run.said
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert loaded.num_parameters() > 100_000
    assert loaded.dtype == torch.float32
