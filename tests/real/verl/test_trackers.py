"""What verl's trackers got in a real run, and where; and that nothing that the run left behind holds a secret."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from agl_runtime.gateway.auth import agent_key
from agl_runtime.trainer.backends.verl.setup import SERVER_KEY
from fakes.planted import AGENT_KEY, PLANTED, leaks, secrets_in
from fakes.verl_run import EXAMPLE, KILLED_AFTER, UPDATES, VerlRun

METRIC = b"actor/pg_loss"
ADMIN_KEY = "the gateway's key"
KEPT = {
    ("key", ADMIN_KEY),  # where all parts and the command line read it
    ("setup.json", "agent.env"),  # the project's settings, of which verl's processes make agl's parts
}
"""Files that hold a secret by design, readable by their owner only."""


def test_each_tracker_has_the_metrics_of_each_step(run: VerlRun) -> None:
    """Of the process that ended by itself: a killed one may not have written its last."""
    steps = [step["step"] for step in run.steps() if step["version"].startswith("2.")]
    assert UPDATES - KILLED_AFTER <= len(steps) < UPDATES
    assert all(f" step:{step} - " in run.log() for step in steps)
    (figures,) = run.root.rglob("figures-2.jsonl")
    lines = [json.loads(line) for line in figures.read_bytes().splitlines()]
    assert [line["step"] for line in lines if METRIC.decode() in line["data"]] == steps
    trackers = run.root / ".agl" / "trackers"
    assert newest(trackers, "events.out.tfevents.*").read_bytes().count(METRIC) == len(steps)
    assert newest(trackers, "*.wandb").read_bytes().count(METRIC) >= len(steps)


def test_trackers_leave_nothing_in_the_projects_folder(run: VerlRun) -> None:
    """What is there goes into the workspaces of agents."""
    own = {path.name for path in EXAMPLE.iterdir()}
    assert {path.name for path in run.root.iterdir()} - own <= {".agl", "__pycache__"}


def test_no_secret_is_in_what_the_run_left_behind(run: VerlRun) -> None:
    """In agl's folder with logs, events, metrics and trackers; in what the commands said; in the user's home; and in
    Ray's logs, with the records of its jobs and their environments."""
    for command in (["config", "show"], ["config", "show", "--json"], ["up", "--dry-run"]):
        assert run.agl(*command) == 0, run.said
    server_keys = {environ[SERVER_KEY] for _, environ in run.killed if SERVER_KEY in environ}
    (server_key,) = server_keys
    admin_key = (run.root / ".agl" / "key").read_text()
    secrets = PLANTED | {"the model server's key": server_key, ADMIN_KEY: admin_key}
    assert AGENT_KEY.fullmatch(agent_key(admin_key, "r", "a", "train").encode())

    found = list(leaks(run.root.parent, secrets))
    assert {(file.name, name) for file, name in found} == KEPT
    assert {stat.S_IMODE((run.root.parent / file).stat().st_mode) for file, _ in found} == {0o600}
    ray = Path(run.env["RAY_TMPDIR"])
    assert any(ray.rglob("runtime_env_agent.log"))
    assert list(leaks(ray, secrets)) == []
    assert [name for line, _ in run.killed for name in secrets_in(line.encode(), secrets)] == []


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.rglob(pattern), key=lambda file: file.stat().st_mtime)
