"""mini-SWE-agent, unmodified, at work on a repository with a failing test, on SmolLM2-135M: one rollout on record, and
one optimizer step. So small a model solves nothing; what counts is that all it said is recorded and trained on.

Harness and training run where only loopback exists, and nothing may be sought elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.environments import environment, interpreter, missing, smollm2

pytest.importorskip("torch")

REQUIREMENTS = ["mini-swe-agent==2.4.6", "litellm==1.110.2"]
COMMAND = (
    "mini -c mini_textbased.yaml -c agent.step_limit=3 --model-class litellm_textbased -m openai/policy"
    " -t {issue} -y --exit-immediately -o trajectory.json"
)
ENV = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
FILES = {
    "calc.py": "def mean(numbers):\n    return sum(numbers) / len(numbers) + 1\n",
    "test_calc.py": """
import unittest

from calc import mean


class MeanTest(unittest.TestCase):
    def test_mean(self):
        self.assertEqual(mean([1, 2, 3]), 2)
""",
    "reward.py": '''
import subprocess
import sys


def reward(workspace, events):
    """Whether the tests pass, and a little for short answers in the form that the harness asks for."""
    tests = subprocess.run([sys.executable, "-m", "unittest", "-q"], cwd=workspace, capture_output=True)
    said = [event["data"]["response"]["choices"][0]["message"]["content"] or "" for event in events
            if event["event_type"] == "model_request"]
    form = sum(text.count("```mswea_bash_command") == 1 for text in said) / len(said)
    brevity = sum(1 / (1 + len(text) / 500) for text in said) / len(said)
    return {"reward": (tests.returncode == 0) + 0.2 * form + 0.2 * brevity, "form": form, "brevity": brevity}
''',
    "tasks.jsonl": json.dumps(
        {"id": "mean", "issue": "mean([1, 2, 3]) in calc.py gives 3.0 but should give 2.0; test_calc.py shows it."}
    ),
}
CUT_OFF = """
import json, subprocess, sys
from pathlib import Path
from agl_cli import netproof

netproof.raise_loopback()
code = subprocess.call([sys.executable, "-m", "agl_cli.main", *sys.argv[2:]])
Path(sys.argv[1]).write_text(json.dumps([netproof.interfaces(), netproof.refused_sends()]), encoding="utf-8")
sys.exit(code)
"""


class Repository:
    """A user's repository with the harness on PATH, prepared by `agl init` and two edits of agl.yaml."""

    def __init__(self, root: Path) -> None:
        self.root = root
        bin_folder = environment(interpreter("3.11"), REQUIREMENTS)
        self._env = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
        for name, text in FILES.items():
            (root / name).write_text(text, encoding="utf-8")
        subprocess.run(["git", "init", "-q", str(root)], check=True)
        self.agl("init", "--yes", "--command", COMMAND, "--model", str(smollm2()))
        settings = yaml.safe_load((root / "agl.yaml").read_text(encoding="utf-8"))
        settings["agent"]["env"] = ENV
        settings["model"]["max_tokens"] = 64
        (root / "agl.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")

    def agl(self, *words: str) -> str:
        return self._done([sys.executable, "-m", "agl_cli.main", *words])

    def agl_cut_off(self, *words: str) -> tuple[str, list[Any]]:
        """stdout of the command in a network namespace of its own; its interfaces, and how many sends found no way."""
        enter = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
        proof = self.root.with_name("proof.json")
        said = self._done([*enter, sys.executable, "-c", CUT_OFF, str(proof), *words])
        return said, json.loads(proof.read_text(encoding="utf-8"))

    def trajectory(self, rollout_id: str) -> dict[str, Any]:
        """What the harness itself wrote of a rollout."""
        file = self.root / f".agl/rollouts/{rollout_id}/0/workspace/trajectory.json"
        return dict(json.loads(file.read_text(encoding="utf-8")))

    def _done(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.root, env=self._env, capture_output=True, text=True, check=False, timeout=1200
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    if subprocess.run(["unshare", "--net", "--user", "--map-root-user", "true"], check=False).returncode:
        missing("this system allows no network namespace")
    root = tmp_path_factory.mktemp("mini") / "repository"
    root.mkdir()
    return Repository(root)


@pytest.fixture(scope="module")
def rollout(repository: Repository) -> dict[str, Any]:
    """One rollout, as `agl run` tells of it."""
    return dict(json.loads(repository.agl("run", "--prove", "--json")))


@pytest.fixture(scope="module")
def update(repository: Repository, rollout: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """One optimizer step from a group of two, as `agl up` tells of it, and what it sought outside."""
    one_step = [f"--set=train.{name}" for name in ("steps=1", "groups_per_step=1", "group_size=2", "token_budget=2048")]
    said, proof = repository.agl_cut_off("up", "--json", *one_step)
    return json.loads(said), proof


def heard(trajectory: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Text, prompt length and length of each answer that reached the harness."""
    responses = [message["extra"].get("response") for message in trajectory["messages"] if "extra" in message]
    return [
        (said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens"], said["usage"]["completion_tokens"])
        for said in responses
        if said
    ]


def on_record(repository: Repository) -> dict[str, list[tuple[str, int, int]]]:
    """The same of each rollout, as it was recorded: the lengths are those of the token ids."""
    found = {}
    for row in map(json.loads, repository.agl("rollouts", "export").splitlines()):
        rollout_id = row["rollout"]["rollout_id"]
        calls = json.loads(repository.agl("rollouts", "show", rollout_id, "--json"))["calls"]
        answers = [event["data"]["response"] for event in row["events"] if event["event_type"] == "model_request"]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        found[rollout_id] = [
            (text, call["prompt_tokens"], call["sampled_tokens"]) for text, call in zip(texts, calls, strict=True)
        ]
    return found


def test_all_that_the_harness_heard_is_on_record(repository: Repository, rollout: dict[str, Any]) -> None:
    assert (rollout["state"], rollout["incomplete_calls"]) == ("succeeded", [])
    assert 0.0 < rollout["reward"] < 2.0
    trajectory = repository.trajectory(rollout["rollout_id"])
    assert trajectory["info"]["mini_version"] == "2.4.6"
    assert on_record(repository) == {rollout["rollout_id"]: heard(trajectory)}
    assert len(rollout["calls"]) == trajectory["info"]["model_stats"]["api_calls"] >= 2


def test_every_sampled_token_is_trainable(repository: Repository, rollout: dict[str, Any]) -> None:
    """A turn whose answer held no command begins a row of its own, since the harness forgets such answers."""
    sampled = sum(call["sampled_tokens"] for call in rollout["calls"])
    assert sum(sample["trained_tokens"] for sample in rollout["samples"]) == sampled > 0
    assert all(call["trainable"] for call in rollout["calls"])
    assert set(rollout["report"]["splits"]) <= {"omitted"}
    shown = repository.agl("rollouts", "show", rollout["rollout_id"])
    assert f"trainable: {sampled} of {sampled} sampled tokens (100%)" in shown


def test_one_optimizer_step_is_taken_from_such_rollouts(
    repository: Repository, update: tuple[dict[str, Any], list[Any]]
) -> None:
    summary, _ = update
    assert (summary["ended"], summary["steps"]) == ("complete", 1)
    (step,) = map(json.loads, (repository.root / ".agl/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert (step["rollouts"], step["scored"], step["failed"], step["trained_share"]) == (2, 2, 0, 1.0)
    assert step["grad_norm"] > 0
    assert 0.0 < step["logprob_gap"] < 1e-4
    assert all(
        answers == heard(repository.trajectory(rollout_id)) for rollout_id, answers in on_record(repository).items()
    )


def test_the_step_has_moved_the_weights(update: tuple[dict[str, Any], list[Any]]) -> None:
    from safetensors.torch import load_file

    before, after = (load_file(Path(folder) / "model.safetensors") for folder in (smollm2(), update[0]["checkpoint"]))
    assert before.keys() == after.keys()
    moved = [float((after[name] - before[name]).abs().max()) for name in before]
    assert all(distance > 0 for distance in moved)
    assert max(moved) < 1e-5  # one AdamW step of train.lr 1e-6


def test_nothing_outside_is_sought(rollout: dict[str, Any], update: tuple[dict[str, Any], list[Any]]) -> None:
    assert rollout["network"] == {"interfaces": ["lo"], "refused": 0}
    assert update[1] == [["lo"], 0]
