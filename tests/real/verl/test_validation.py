"""A run with verl that is stopped in its last validation: the next start validates, and nothing else is done again."""

from __future__ import annotations

import pytest

from fakes.verl_run import VerlRun

REWARD = """
import time
from pathlib import Path
from reward import reward as right

SEEN = Path(__file__).with_name("seen")

def reward(task, output):
    if not task["id"].startswith("val"):
        return right(task, output)
    if not SEEN.exists():
        SEEN.touch()
        raise ValueError("the first validation gets no reward")
    while SEEN.with_name("stopping").exists():
        time.sleep(0.1)
    return right(task, output)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    train = {"steps": 1, "groups_per_step": 4, "group_size": 4}
    run = VerlRun(tmp_path_factory.mktemp("run") / "calculator", train, validated=1, reward="held.py:reward")
    (run.root / "held.py").write_text(REWARD)
    (run.root / "stopping").touch()
    run.up_until_told(kind="validating", step=1)
    (run.root / "stopping").unlink()
    return run


def test_a_first_validation_without_any_reward_is_passed_over(run: VerlRun) -> None:
    assert "the validation at step 0 says nothing" in run.log()
    assert run.summary["ended"] == "stopped"


def test_the_next_start_validates_and_the_step_stands_there_without_what_verl_had_not_told(run: VerlRun) -> None:
    assert run.up() == 0, run.said
    assert (run.summary["ended"], run.summary["steps"]) == ("complete", 1)
    assert run.summary["after"]["tasks"] == 1
    (step,) = run.steps()
    assert step["version"] == run.summary["version"] == "1.1"
    assert step["rollouts"] == 16
    assert step["loss"] is None
