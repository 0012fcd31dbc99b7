"""`agl run` and `agl rollouts` with the real gateway, controller and trainer; the model server is a fake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from agl_cli.main import app
from agl_cli.reference import JSON_KEYS
from fakes.model_server import Answer, FakeModelServer
from fakes.projects import make_project


@pytest.fixture
def server() -> Iterator[FakeModelServer]:
    with FakeModelServer([Answer("It is 1.")]) as server:
        yield server


@pytest.fixture
def root(tmp_path: Path, server: FakeModelServer) -> Path:
    settings = {"model": {"endpoint": server.url}, "gateway": {"upstream_retries": 0, "upstream_timeout_s": 2}}
    return make_project(tmp_path / "project", settings)


def agl(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--project", str(root)], catch_exceptions=False)


def test_a_rollout_is_run_shown_listed_and_exported(root: Path) -> None:
    result = agl(root, "run", "--task", "t0", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert list(found) == list(JSON_KEYS["agl rollouts show"])
    assert (found["state"], found["reward"], found["task_id"]) == ("succeeded", 1.0, "t0")
    assert found["agent"]["exit_code"] == 0
    assert [call["trainable"] for call in found["calls"]] == [True]
    assert [sample["calls"] for sample in found["samples"]] == [[found["calls"][0]["call_id"]]]

    (listed,) = json.loads(agl(root, "rollouts", "ls", "--json").stdout)
    assert listed == {key: found[key] for key in JSON_KEYS["agl rollouts ls"]}
    assert json.loads(agl(root, "rollouts", "ls", "--mode", "val", "--json").stdout) == []

    shown = agl(root, "rollouts", "show", found["rollout_id"])
    assert "user: What is 0 + 1?" in shown.stdout
    assert "assistant: It is 1." in shown.stdout
    assert "sample 1: " in shown.stdout
    (sampled,) = (call["sampled_tokens"] for call in found["calls"])
    assert f"trainable: {sampled} of {sampled} sampled tokens (100%)" in shown.stdout

    (row,) = map(json.loads, agl(root, "rollouts", "export", "--format", "sft").stdout.splitlines())
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    (raw,) = map(json.loads, agl(root, "rollouts", "export").stdout.splitlines())
    assert raw["rollout"]["rollout_id"] == found["rollout_id"]
    assert {event["event_type"] for event in raw["events"]} >= {"model_request", "agent_exit", "reward"}
    assert agl(root, "rollouts", "export", "--min-reward", "2").stdout == ""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(status=500), "answered 500"),
        (Answer(fault="garbage"), "The model server's answer is no JSON"),
        (Answer(fault="drop"), "broke off"),
        (Answer(gated=True), "fell silent"),
    ],
)
def test_a_model_server_that_fails_is_the_rollouts_error(
    root: Path, server: FakeModelServer, answer: Answer, reason: str
) -> None:
    server.script = [answer]
    result = agl(root, "run", "--json")
    assert result.exit_code == 1
    found: dict[str, Any] = json.loads(result.stdout)
    assert (found["state"], found["reward"]) == ("failed", None)
    assert reason in found["error"]


def test_answers_without_token_ids_are_recorded_and_said_to_be_untrainable(root: Path, server: FakeModelServer) -> None:
    server.script = [Answer("It is 1.", ids="absent", prompt_ids="absent")]
    result = agl(root, "run")
    assert result.exit_code == 0
    assert "no: no_prompt_ids" in result.stdout
    assert "sample 1" not in result.stdout


def test_an_agent_that_fails_is_data_and_its_last_words_are_shown(root: Path) -> None:
    (root / "agent.py").write_text("raise SystemExit('I give up')", encoding="utf-8")
    result = agl(root, "run")
    assert result.exit_code == 0, result.stderr
    assert "exit code 1" in result.stdout
    assert "I give up" in result.stdout
    assert "The agent made no model call." in result.stdout


def test_an_unknown_task_names_the_nearest(root: Path) -> None:
    result = agl(root, "run", "--task", "t00")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "No task has the id t00; did you mean t0?" in result.stderr


def test_an_unknown_rollout_is_not_found(root: Path) -> None:
    result = agl(root, "rollouts", "show", "nope")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "There is no rollout nope" in result.stderr


def test_with_the_network_cut_off_a_foreign_server_is_refused(root: Path) -> None:
    result = agl(root, "run", "--prove")
    assert result.exit_code == 2
    assert "With the network cut off model.endpoint is out of reach." in result.stderr


@pytest.fixture
def without_uvloop(tmp_path: Path) -> dict[str, str]:
    """An environment in which the gateway fails as it starts."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "uvloop.py").write_text("raise ModuleNotFoundError('No module named uvloop')")
    return os.environ | {"PYTHONPATH": str(tmp_path / "broken")}


def started(root: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agl_cli.main", "run", "--project", str(root)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_gateway_that_cannot_start_ends_the_command_with_its_last_words(
    root: Path, without_uvloop: dict[str, str]
) -> None:
    with started(root, without_uvloop) as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Error: The gateway stopped: ModuleNotFoundError: No module named uvloop" in said
    assert "is killed" not in said


def test_a_terminated_run_ends_its_parts_in_order(root: Path, without_uvloop: dict[str, str]) -> None:
    with started(root, without_uvloop) as process:
        assert process.stderr is not None
        assert "gateway died" in process.stderr.readline()
        parts = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert process.returncode in (1, 130)  # the gateway's second death may have come first
    assert "is killed" not in said
    assert psutil.wait_procs(parts, timeout=0)[1] == []
