"""Projects with small agents of their own, run by the real process runner."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from agl_runtime.config import Project, load_project
from agl_runtime.controller.runners.base import AgentRun
from agl_runtime.controller.runners.isolation import Isolation, Kind, probe_isolation
from agl_runtime.controller.runners.process import ProcessRunner
from fakes.claims import granted

Way = Kind | Literal["warm", "warm sandbox"]
"""How an agent is started: cold with a kind of isolation, or warm, without isolation or with what there is."""

KINDS: tuple[Kind, ...] = ("none", "unshare", "bubblewrap")
WAYS: tuple[Way, ...] = (*KINDS, "warm", "warm sandbox")
SANDBOXES: tuple[Way, ...] = ("unshare", "bubblewrap", "warm sandbox")
PYTHON = sys.executable


def isolation(way: Way) -> Isolation:
    """Skips where this machine lacks it; in CI only bubblewrap may be missing."""
    if way in ("none", "warm"):
        return Isolation("none", "not asked for")
    found = probe_isolation() if way == "warm sandbox" else probe_isolation((way,))  # type: ignore[arg-type]
    if found.kind == "none":
        if way != "bubblewrap" and os.environ.get("CI") and sys.platform.startswith("linux"):
            pytest.fail(f"In CI agents must be isolated: {found.reason}", pytrace=False)
        pytest.skip(found.reason)
    return found


def make_project(
    root: Path, files: Mapping[str, str] | None = None, *, agent: Mapping[str, Any] | None = None, **sections: Any
) -> Project:
    """A project in `root` whose agent is agent.py, started with this Python. JSON is YAML."""
    root.mkdir(parents=True, exist_ok=True)
    settings = {"agent": {"command": [PYTHON, "agent.py"], **(agent or {})}, **sections}
    for name, text in {"agl.yaml": json.dumps(settings), **(files or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return load_project(root, environ={})


def runner_of(project: Project, way: Way = "none", environ: Mapping[str, str] | None = None) -> ProcessRunner:
    """Close it, where it starts agents warm."""
    if way.startswith("warm") and not project.config.agent.warm:
        agent = project.config.agent.model_copy(update={"warm": True})
        project = replace(project, config=project.config.model_copy(update={"agent": agent}))
    runner = ProcessRunner(project, "http://gateway", isolation(way), environ=environ or os.environ)
    runner.clean_up()
    return runner


@asynccontextmanager
async def running(
    project: Project, way: Way = "none", *, environ: Mapping[str, str] | None = None
) -> AsyncIterator[ProcessRunner]:
    """A runner that is closed; one that is to start agents warm must do so."""
    runner = runner_of(project, way, environ)
    try:
        yield runner
        assert runner.starts == ("warm" if way.startswith("warm") else "cold")
    finally:
        runner.close()


async def run_agent(
    project: Project, way: Way = "none", task: Any = None, *, environ: Mapping[str, str] | None = None
) -> AgentRun:
    """One attempt, without a time limit."""
    async with running(project, way, environ=environ) as runner:
        return await runner.run(granted(task=task), asyncio.Event())


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True, text=True)
    return done.stdout


def processes_with(mark: str) -> list[psutil.Process]:
    """Living processes that carry `mark` in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(mark in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


async def until(happened: Callable[[], Any]) -> None:
    """Wait for what another process brings about."""
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.02)
