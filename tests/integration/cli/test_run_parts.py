"""`agl up` over small programs that stand in for the parts: how a run ends, and what stops it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner, Result

from agl_cli import training
from agl_cli.main import app
from agl_cli.supervisor import PartCommand
from agl_runtime.config import Project
from fakes.projects import make_project

WAITS = "import signal, sys, threading; stop = threading.Event(); "
WAITS += "signal.signal(signal.SIGTERM, lambda *_: stop.set()); stop.wait()"
STEP: dict[str, Any] = {
    "kind": "step", "run_id": "r", "elapsed_s": 1.0, "step": 1, "reward_mean": 0.5, "reward_std": 0.5, "rollouts": 4,
    "failed": 0, "groups": 2, "groups_without_spread": 0, "sampled_tokens": 40, "sample_s": 2.0, "agent_cpu_s": 0.5,
    "agent_rss_mb": 60.0, "update_s": 0.25, "skipped": None,
}  # fmt: skip
SCORE = {"pass_at_1": 0.5, "ci_low": 0.1, "ci_high": 0.9, "reward_mean": 0.5, "tasks": 2, "rollouts": 2}
SUMMARY: dict[str, Any] = {
    "run_id": "r", "mode": "train", "seed": 0, "before": SCORE, "after": SCORE | {"pass_at_1": 0.75}, "steps": 1,
    "seconds": 3.0, "checkpoint": "/somewhere/1.1", "ended": "complete", "reason": None,
}  # fmt: skip
RUN = """
import json, os, pathlib, signal, sys, threading
state, behaviour, step, summary = pathlib.Path(sys.argv[1]), *sys.argv[2:5]
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
with (state / "metrics.jsonl").open("a") as file:
    file.write(step + "\\n")
if behaviour == "wrong":
    print("2026-01-01 00:00:00,000 ERROR   agl_runtime.trainer: There is no policy. Set model.path.", file=sys.stderr)
    sys.exit(2)
if behaviour == "ends":
    (state / "summary.json").write_text(summary)
    sys.exit(0)
if behaviour == "deaf":  # does not stop when asked to; the user then asks again
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))
os.kill(os.getppid(), signal.SIGTERM if behaviour == "ended by down" else signal.SIGINT)
stop.wait()
(state / "summary.json").write_text(json.dumps({**json.loads(summary), "ended": "stopped"}))
"""
Run = Callable[..., Result]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = make_project(tmp_path / "project")
    (root / ".agl").mkdir()
    return root


@pytest.fixture
def run(root: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`agl up` whose trainer behaves in the given way and leaves the given summary."""

    def up(behaviour: str, *arguments: str, **changes: Any) -> Result:
        def commands(project: Project, settings: Sequence[str], *trainer: str) -> list[PartCommand]:
            texts = (json.dumps(STEP), json.dumps({**SUMMARY, **changes}))
            part = (sys.executable, "-c", RUN, str(project.state_dir), behaviour, *texts)
            waits = (sys.executable, "-c", WAITS)
            return [
                PartCommand("gateway", waits),
                PartCommand("controller", waits),
                PartCommand("trainer", part, once=True),
            ]

        monkeypatch.setattr(training, "part_commands", commands)
        result = CliRunner().invoke(app, ["up", "--project", str(root), *arguments], catch_exceptions=False)
        assert psutil.Process().children() == []
        assert not (root / ".agl" / "run" / "up.json").exists()
        return result

    return up


def test_a_complete_run_shows_before_and_after(run: Run) -> None:
    result = run("ends")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "complete after 1 step, 3 s",
        "before      pass@1 0.500 (0.100 to 0.900) on 2 tasks",
        "after       pass@1 0.750 (0.100 to 0.900) on 2 tasks",
        "checkpoint  /somewhere/1.1",
    ]
    assert "step 1/2  reward 0.50 ± 0.50" in result.stderr
    assert "training: 1 k parameters on the CPU" in result.stderr


def test_json_is_one_object_and_progress_stays_on_stderr(run: Run) -> None:
    result = run("ends", "--json")
    assert json.loads(result.stdout) == SUMMARY
    assert "step 1/2" in result.stderr


def test_no_signal_fails_with_its_reason(run: Run) -> None:
    result = run("ends", ended="no_signal", reason="No signal: every reward is 0.")
    assert result.exit_code == 1
    assert "no signal after 1 step" in result.stdout
    assert "No signal: every reward is 0." in result.stderr


def test_a_part_with_a_wrong_configuration_ends_the_run_with_its_words(run: Run) -> None:
    result = run("wrong")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: The trainer stopped: There is no policy. Set model.path.\n  See `agl logs trainer`." in result.stderr


def test_one_interrupt_stops_gracefully(run: Run) -> None:
    result = run("interrupted")
    assert result.exit_code == 130
    assert "stopped after 1 step" in result.stdout
    assert "Ctrl-C again kills" in result.stderr


def test_a_second_interrupt_kills(run: Run) -> None:
    result = run("deaf")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "Killing the parts." in result.stderr


def test_a_run_that_is_stopped_by_down_does_not_look_complete(run: Run) -> None:
    result = run("ended by down", "--json")
    assert (result.exit_code, json.loads(result.stdout)["ended"]) == (130, "stopped")


def test_a_dry_run_prints_what_would_run(root: Path) -> None:
    result = CliRunner().invoke(app, ["up", "--project", str(root), "--dry-run", "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    commands = json.loads(result.stdout)
    assert list(commands) == ["gateway", "controller", "trainer"]
    assert commands["trainer"][1:5] == ["-m", "agl_runtime.trainer", "--root", str(root)]
    assert not (root / ".agl" / "run").exists()
