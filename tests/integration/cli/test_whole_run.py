"""The command line over real parts and a real, tiny policy: training, resuming, measuring, background, proof."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agl_cli.main import app
from agl_cli.reference import JSON_KEYS
from fakes.projects import AGENT, make_model_folder, make_project
from fakes.tiny_model import make_tiny_policy

REWARD = """
import random

def reward(output):
    return random.random()  # spread without which nothing would be updated
"""
STRAY = "\nimport socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect_ex(('192.0.2.1', 53))\n"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    make_tiny_policy(folder)
    return folder


@pytest.fixture
def root(tmp_path: Path, policy: Path) -> Iterator[Path]:
    settings = {"model": {"path": str(policy), "max_tokens": 8}, "train": {"lr": 0.001}}
    root = make_project(tmp_path / "project", settings)
    (root / "reward.py").write_text(REWARD, encoding="utf-8")
    yield root
    agl(root, "down")


def agl(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--project", str(root)], catch_exceptions=False)


def data(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_run_trains_is_resumed_and_its_policy_measured(root: Path) -> None:
    first = data(agl(root, "up", "--json", "--set", "train.steps=1"))
    assert [*first, "(with --dry-run)"] == list(JSON_KEYS["agl up"])
    assert (first["ended"], first["steps"]) == ("complete", 1)

    second = agl(root, "up", "--json")
    resumed = data(second)
    assert (resumed["run_id"], resumed["steps"], resumed["ended"]) == (first["run_id"], 2, "complete")
    assert "step 2/2  reward" in second.stderr
    assert "step 1/2  reward" not in second.stderr

    measured = data(agl(root, "eval", "--limit", "1", "--samples", "2", "--json"))
    assert list(measured) == list(JSON_KEYS["agl eval"])
    assert (measured["policy"], measured["tasks"], measured["rollouts"]) == (resumed["checkpoint"], 1, 2)


def test_a_background_run_is_watched_used_and_stopped(root: Path) -> None:
    command = [sys.executable, "-m", "agl_cli.main", "up", "--detach", "--set", "train.steps=1000"]
    started = subprocess.run([*command, "--project", str(root)], capture_output=True, text=True, check=False)
    assert (started.returncode, started.stdout) == (0, ""), started.stderr
    assert "`agl down` stops it." in started.stderr

    rollout = data(agl(root, "run", "--task", "t1", "--json"))
    assert rollout["task_id"] == "t1"
    found = data(agl(root, "status", "--json"))
    assert found["running"]["command"] == "up"
    assert {part["part"] for part in found["parts"]} == {"gateway", "controller", "trainer"}

    again = agl(root, "eval", "--json")
    assert (again.exit_code, again.stdout) == (3, "")
    assert "`agl up` (process" in again.stderr

    assert agl(root, "down").stderr == "Stopped `agl up`.\n"
    assert data(agl(root, "status", "--json"))["summary"]["ended"] == "stopped"


def test_a_model_that_does_not_load_is_told_and_leaves_nothing_to_run(root: Path) -> None:
    make_model_folder(root / "broken")
    result = agl(root, "run", "--set", "model.path=broken")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "The trainer stopped: The model in" in result.stderr
    assert data(agl(root, "rollouts", "ls", "--json")) == []


@pytest.mark.parametrize(("agent", "refused"), [(AGENT, 0), (AGENT + STRAY, 1)])
def test_a_proof_counts_what_sought_a_way_out(root: Path, agent: str, refused: int) -> None:
    (root / "agent.py").write_text(agent, encoding="utf-8")
    command = [sys.executable, "-m", "agl_cli.main", "run", "--prove", "--json", "--project", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        assert "allows no network namespace" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["network"] == {"interfaces": ["lo"], "refused": refused}
