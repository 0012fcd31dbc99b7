"""`agl run`: one rollout through the gateway, as training would run it, and what came of it."""

from __future__ import annotations

import asyncio
import difflib
import math
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from agl_cli import checks, diagnostics, netproof, recorded
from agl_cli.commands import rollouts
from agl_cli.options import HERE, AsJson, ProjectDir, Settings
from agl_cli.project import open_project
from agl_cli.recorded import Recorded
from agl_cli.runstate import read_record
from agl_cli.session import open_session
from agl_cli.supervisor import PartCommand, part_command
from agl_runtime.client import GatewayClient
from agl_runtime.config import Project
from agl_runtime.errors import AglError, ConfigError, PreconditionError
from agl_runtime.schemas import (
    TERMINAL_STATES,
    RolloutConfig,
    RolloutCreate,
    RolloutMetadata,
    RolloutState,
)
from agl_runtime.trainer.data import Task, load_tasks

POLL_S = 0.2


def run(
    task: Annotated[
        str | None, typer.Option("--task", help="Id of the task; the first training task unless given.")
    ] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="Cut the network off, and show that nothing was sought elsewhere.")
    ] = False,
    policy: Annotated[
        Path | None, typer.Option("--policy", help="A Hugging Face folder instead of the newest checkpoint.")
    ] = None,
    project: ProjectDir = HERE,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Run the agent on one task and show its reward, its conversation, its model calls and the samples they make. An
    agent that fails is data, scored as in training: exit code 1 means that the rollout was lost."""
    opened = open_project(project, settings)
    chosen = pick(opened, task)
    running = read_record(opened.state_dir)
    if running and (prove or policy or settings):
        raise PreconditionError(
            f"`agl {running.command}` runs here, with its own policy and settings.", "Stop it with `agl down` first."
        )
    if prove and opened.config.model.endpoint and not policy:
        raise ConfigError("With the network cut off model.endpoint is out of reach.", "Name a folder with --policy.")
    if prove and not netproof.is_cut_off():
        netproof.cut_off(_arguments(project, task, policy, settings or (), as_json=as_json))
    if prove:
        netproof.raise_loopback()
    if code := checks.require(opened, checks.AGENT if policy else checks.SERVING):
        raise typer.Exit(code)
    item = recorded.diagnosed(asyncio.run(_rollout(opened, chosen, _commands(opened, settings or (), policy))), opened)
    proof = netproof.Proof(interfaces=netproof.interfaces(), refused=netproof.refused_sends()) if prove else None
    rollouts.render(item, as_json=as_json, network=proof)
    lost = item.rollout.status.state is RolloutState.FAILED and item.calls.reward is None
    if lost or (prove and not item.calls.calls):
        raise typer.Exit(diagnostics.FAILED)


def pick(project: Project, task_id: str | None) -> Task:
    """The task of that id, or the first. Raises ConfigError."""
    data = project.config.data
    files = [(data.train, "data.train"), (data.val, "data.val")]
    tasks = [task for file, name in files if file for task in load_tasks(project.path(file), name)]
    if not tasks:
        raise ConfigError("There are no tasks.", "Set data.train in agl.yaml to a JSON Lines file.")
    found = [task for task in tasks if task_id in (None, task.task_id)]
    if not found:
        near = difflib.get_close_matches(str(task_id), [task.task_id for task in tasks], n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ConfigError(f"No task has the id {task_id}{hint}", "See the `id` fields of your task files.")
    return found[0]


def _commands(project: Project, settings: Sequence[str], policy: Path | None) -> list[PartCommand]:
    serve = ["--mode", "serve", *(["--policy", str(policy.resolve())] if policy else [])]
    return [
        part_command("gateway", project.root, settings),
        part_command("controller", project.root, settings),
        part_command("trainer", project.root, settings, *serve),
    ]


def _arguments(
    project: Path, task: str | None, policy: Path | None, settings: Iterable[str], *, as_json: bool
) -> list[str]:
    """This very command once more."""
    words = ["run", "--prove", "--project", str(project)]
    words += ["--task", task] if task else []
    words += ["--policy", str(policy)] if policy else []
    words += [word for item in settings for word in ("--set", item)]
    return words + (["--json"] if as_json else [])


async def _rollout(project: Project, task: Task, commands: Sequence[PartCommand]) -> Recorded:
    async with open_session(project, commands, "run") as session:
        rollout_id = f"run-{secrets.token_hex(6)}"
        create = RolloutCreate(
            input=task.data,
            config=RolloutConfig(timeout_seconds=math.ceil(project.config.agent.timeout_s)),
            metadata=RolloutMetadata.model_validate({"task_id": task.task_id}),
            rollout_id=rollout_id,
        )
        await session.wait(_served(session.client))
        await session.client.add_rollouts([create])
        try:
            await session.wait(_ended(session.client, rollout_id))
        except (AglError, asyncio.CancelledError):  # or a later command would find it and run it
            await session.client.finish(rollout_id, RolloutState.FAILED, "`agl run` was stopped.")
            raise
        return await recorded.fetch(session.client, rollout_id, project)


async def _served(client: GatewayClient) -> None:
    """Wait until calls are served, so that the agent's client need not wait for a model that loads."""
    said = None
    while waits := await _waits(client):
        if waits != said:
            diagnostics.note(f"waiting for {waits}")
            said = waits
        await asyncio.sleep(POLL_S)


async def _waits(client: GatewayClient) -> str | None:
    return next((part.waiting_for for part in await client.parts() if part.part == "gateway"), None)


async def _ended(client: GatewayClient, rollout_id: str) -> None:
    """Wait until the rollout has ended, saying what it waits for."""
    said = None
    while (rollout := (await client.rollout(rollout_id)).rollout).status.state not in TERMINAL_STATES:
        waits = await _waits(client)
        news = f"{rollout.status.state.value}, waiting for {waits}" if waits else rollout.status.state.value
        if news != said:
            diagnostics.note(f"{rollout_id}: {news}")
            said = news
        await asyncio.sleep(POLL_S)
