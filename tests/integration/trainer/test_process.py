"""The trainer as the process that it is, with the embedded backend and a tiny policy: killed, stopped, refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.client import GatewayClient
from agl_runtime.config import Project
from agl_runtime.part import KEY_FILE, announce_gateway
from agl_runtime.trainer.state import checkpoints
from fakes.player import Player, playing
from fakes.running_gateway import ADMIN_KEY, running_gateway
from fakes.tiny_model import make_tiny_policy
from fakes.training import SETTINGS, make_project, read_lines, read_summary

PATIENCE_S = 90
STEPS = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy") / "noise", context=512)


def settings(policy: Path, **more: str) -> dict[str, str]:
    fixed = {"model.path": str(policy), "train.steps": str(STEPS), "train.lr": "1e-3", "model.max_tokens": "8"}
    return SETTINGS | fixed | {name.replace("__", "."): value for name, value in more.items()}


@contextlib.asynccontextmanager
async def trainer(project: Project, chosen: dict[str, str], *more: str) -> AsyncIterator[asyncio.subprocess.Process]:
    sets = [word for path, value in chosen.items() for word in ("--set", f"{path}={value}")]
    command = [sys.executable, "-m", "agl_runtime.trainer", "--root", str(project.root), *sets, *more]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    async with asyncio.timeout(PATIENCE_S):
        _, errors = await process.communicate()
    return process.returncode, errors.decode()


async def until_line(project: Project, kind: str, step: int) -> None:
    """Until the metrics hold this line."""
    async with asyncio.timeout(PATIENCE_S):
        while not any((line["kind"], line["step"]) == (kind, step) for line in _lines(project)):
            await asyncio.sleep(0.05)


def _lines(project: Project) -> list[dict[str, Any]]:
    return read_lines(project) if (project.state_dir / "metrics.jsonl").exists() else []


@contextlib.asynccontextmanager
async def at_work(folder: Path, chosen: dict[str, str]) -> AsyncIterator[tuple[Project, Player]]:
    project = make_project(folder / "project", chosen)
    (project.state_dir / KEY_FILE).write_text(ADMIN_KEY)
    async with running_gateway(folder) as gateway, playing(Player(gateway.url, ADMIN_KEY, calls=1)) as player:
        announce_gateway(project.state_dir, gateway.url)
        yield project, player


@pytest.mark.parametrize("active", ["2", "4"])
async def test_a_trainer_killed_in_mid_run_is_continued_by_the_same_command(
    active: str, tmp_path: Path, policy: Path
) -> None:
    chosen = settings(policy, train__active_groups=active)
    async with at_work(tmp_path, chosen) as (project, player):
        async with trainer(project, chosen) as first:
            await until_line(project, "step", 1)
            first.send_signal(signal.SIGKILL)
            await first.wait()
        async with trainer(project, chosen) as second:
            code, errors = await ended(second)
        async with GatewayClient(player.url, ADMIN_KEY) as client:
            records = await client.checkpoints()
    assert code == 0, errors
    lines, summary = read_lines(project), read_summary(project)
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3]
    assert (summary["ended"], summary["steps"], summary["version"]) == ("complete", STEPS, f"2.{STEPS}")
    assert summary["before"] is not None
    assert summary["after"] is not None
    assert summary["logprob_gap_max"] < 1e-4
    trained = [name for record in records for name in record.rollout_ids]
    assert len(trained) == len(set(trained)) == STEPS * 4
    assert sorted(player.played) == sorted(set(player.played))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in checkpoints(project.state_dir)[-1].folder.iterdir()
    }


async def test_a_trainer_asked_to_stop_ends_in_order(tmp_path: Path, policy: Path) -> None:
    chosen = settings(policy, train__steps="1000", data__val="null")
    async with at_work(tmp_path, chosen) as (project, _), trainer(project, chosen) as process:
        await until_line(project, "step", 1)
        process.send_signal(signal.SIGTERM)
        code, errors = await ended(process)
    assert code == 0, errors
    summary = read_summary(project)
    assert summary["ended"] == "stopped"
    assert checkpoints(project.state_dir)[-1].saved.step == summary["steps"] >= 1


@pytest.mark.parametrize(
    ("setting", "value", "complaint"),
    [
        ("data.train", "none.jsonl", "The task file .*none.jsonl.* cannot be read"),
        (
            "model.endpoint",
            "http://127.0.0.1:1/v1",
            "model.endpoint names a server whose weights are not agl's to train",
        ),
        ("model.path", "nowhere", r"There is no folder .*nowhere \(model\.path\)"),
        ("reward.function", "null", "Nothing gives rollouts a reward"),
    ],
)
async def test_a_configuration_that_cannot_be_trained_is_refused_at_once(
    setting: str, value: str, complaint: str, tmp_path: Path
) -> None:
    project = make_project(tmp_path / "project")
    async with trainer(project, SETTINGS | {setting: value}) as process:
        code, errors = await ended(process)
    assert code == 2
    assert re.search(complaint, errors)
    assert not (project.state_dir / "run.json").exists()


async def test_a_policy_that_does_not_load_fails_with_a_summary_that_says_so(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "project" / "base")
    async with at_work(tmp_path, chosen) as (project, _), trainer(project, chosen) as process:
        code, errors = await ended(process)
    assert code == 2
    summary = json.loads((project.state_dir / "summary.json").read_text())
    assert summary["ended"] == "failed"
    assert summary["reason"] in errors
