from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from agl_cli.commands.status import look
from agl_cli.main import app
from agl_cli.project import open_project
from agl_cli.reference import JSON_KEYS
from agl_cli.runstate import RunLock
from fakes.projects import make_project

STEP: dict[str, Any] = {
    "kind": "step", "run_id": "r", "elapsed_s": 1.0, "step": 3, "reward_mean": 0.5, "reward_std": 0.5, "rollouts": 4,
    "failed": 0, "groups": 2, "groups_without_spread": 0, "sampled_tokens": 40, "sample_s": 1.5,
    "hold_s": 0.5, "agent_cpu_s": 0.5,
    "agent_rss_mb": 60.0, "update_s": 0.25, "skipped": None,
}  # fmt: skip
SUMMARY: dict[str, Any] = {
    "mode": "train", "ended": "no_signal", "steps": 1, "reason": "No signal: all rewards are equal.", "after": None,
}  # fmt: skip


def status(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["status", "--project", str(root), *arguments], catch_exceptions=False)


def test_nothing_runs_in_a_fresh_project(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    result = status(root)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Nothing runs here.\n", "")
    found = json.loads(status(root, "--json").stdout)
    assert list(found) == list(JSON_KEYS["agl status"])
    assert (found["running"], found["parts"], found["summary"]) == (None, [], None)


def test_the_last_run_is_told_when_nothing_runs(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    (root / ".agl").mkdir()
    (root / ".agl" / "metrics.jsonl").write_text(json.dumps(STEP) + "\n", encoding="utf-8")
    (root / ".agl" / "summary.json").write_text(json.dumps(SUMMARY), encoding="utf-8")
    assert status(root).stdout.splitlines() == [
        "Nothing runs here.",
        "step 3  reward 0.50 ± 0.50  2 groups  4 rollouts  20 tokens/s  0.50 CPU s and 60 MB an agent  update 0.25 s",
        "last train: no_signal after 1 step",
        "No signal: all rewards are equal.",
    ]


def test_what_is_recorded_is_not_said_to_be_nothing_when_nothing_runs(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    (root / ".agl").mkdir()
    (root / ".agl" / "store.sqlite3").touch()
    counts = "Recorded rollouts and calls are counted only while the gateway runs; see `agl rollouts ls`."
    assert status(root).stdout.splitlines() == ["Nothing runs here.", counts]
    found = json.loads(status(root, "--json").stdout)
    names = ("rollouts", "running_calls", "trainable_calls", "untrainable_calls")
    assert [found[name] for name in names] == [None] * 4


async def test_a_gateway_that_cannot_be_reached_is_said_to_be(tmp_path: Path) -> None:
    project = open_project(make_project(tmp_path / "project"))
    with RunLock(project.state_dir, "up"):
        found = await look(project)
    assert found["running"]["command"] == "up"
    (gateway,) = found["parts"]
    assert (gateway["part"], gateway["state"]) == ("gateway", "unreachable")
    assert gateway["detail"] == {"error": "No gateway runs for this project."}
