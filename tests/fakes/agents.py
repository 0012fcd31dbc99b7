"""Projects with small agents of their own, run by the real process runner."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from agl_runtime.config import Project, load_project
from agl_runtime.controller.runners.base import AgentRun
from agl_runtime.controller.runners.isolation import Isolation, Kind, probe_isolation
from agl_runtime.controller.runners.process import ProcessRunner
from fakes.claims import granted

KINDS: tuple[Kind, ...] = ("none", "unshare", "bubblewrap")
PYTHON = sys.executable


def isolation(kind: Kind) -> Isolation:
    """Skips where this machine lacks it; in CI only bubblewrap may be missing."""
    if kind == "none":
        return Isolation("none", "not asked for")
    found = probe_isolation((kind,))
    if found.kind == "none":
        if kind == "unshare" and os.environ.get("CI") and sys.platform.startswith("linux"):
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


def runner_of(project: Project, kind: Kind = "none", environ: Mapping[str, str] | None = None) -> ProcessRunner:
    runner = ProcessRunner(project, "http://gateway", isolation(kind), environ=environ or os.environ)
    runner.clean_up()
    return runner


async def run_agent(
    project: Project, kind: Kind = "none", task: Any = None, *, environ: Mapping[str, str] | None = None
) -> AgentRun:
    """One attempt, without a time limit."""
    return await runner_of(project, kind, environ).run(granted(task=task), asyncio.Event())


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
