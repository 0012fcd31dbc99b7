"""`agl doctor` over what a project has recorded, with nothing running: it starts a gateway for as long as it looks."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
from typer.testing import CliRunner

from agl_cli.main import app
from agl_runtime.part import STORE_FILE, make_state_dir
from agl_runtime.schemas import RolloutCreate, RolloutState, RolloutStatusPatch
from agl_runtime.store.sqlite import open_store
from fakes.projects import make_project
from fakes.recorded import record
from fakes.tiny_model import make_tiny_tokenizer


def prepared(folder: Path) -> Path:
    root = make_project(folder / "project")
    make_tiny_tokenizer().save_pretrained(root / "model")
    make_state_dir(root / ".agl")
    return root


def doctor(root: Path) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", "--project", str(root), "--json"], catch_exceptions=False)
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


def told(hour: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": f"It is {hour}."}]}


# The ids of the second call's prompt, and the hour that the agent's instructions tell by then.
ROLLOUTS = {
    "whole": ([1, 2, 3, 4], "nine"),
    "split": ([1, 2, 9, 4], "nine"),
    "clock": ([1, 2, 9, 4], "ten"),
    "going": ([7], "nine"),
}


async def record_rollouts(folder: Path) -> None:
    """One that went on by its ids, two that did not (in one the agent had changed its instructions), and one that still
    runs."""
    store = open_store(folder / STORE_FILE)
    await store.open()
    await store.add_rollouts([RolloutCreate(input={}, rollout_id=name) for name in ROLLOUTS])
    for name, (second, hour) in ROLLOUTS.items():
        await record(store, f"{name}-0", rollout_id=name, request=told("nine"))
        await record(store, f"{name}-1", second, [5], rollout_id=name, request=told(hour))
        ends = () if name == "going" else (RolloutState.RUNNING, RolloutState.SUCCEEDED)
        for state in ends:
            await store.patch_rollout(name, RolloutStatusPatch(state=state))
    await store.close()


def test_doctor_tells_into_how_many_samples_recorded_rollouts_fell_and_why(tmp_path: Path) -> None:
    root = prepared(tmp_path)
    assert "continuity" not in doctor(root)
    asyncio.run(record_rollouts(root / ".agl"))
    found = doctor(root)["continuity"]
    assert found["state"] == "warning"
    assert found["what"] == (
        "of the newest 3 rollouts of agent.py, 1 became 1 sample, 2 became 2 samples; splits: 1 template, 1 rewritten "
        "(template of model)."
    )
    assert found["fix"].startswith("Use a chat template that leaves earlier turns as they were")
    assert "The agent changed what it had sent" in found["fix"]
    assert psutil.Process().children() == []


def test_doctor_says_when_nothing_was_recorded_that_could_split(tmp_path: Path) -> None:
    root = prepared(tmp_path)
    (root / ".agl" / STORE_FILE).touch()
    found = doctor(root)["continuity"]
    assert (found["state"], found["what"]) == ("ok", "no training rollout is recorded that can be trained on")
