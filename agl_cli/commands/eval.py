"""`agl eval`: pass@1 of a policy on the validation tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_cli import checks, diagnostics, output
from agl_cli.options import HERE, AsJson, ProjectDir, Settings
from agl_cli.progress import pass_at_1
from agl_cli.project import open_project
from agl_cli.training import run_parts


def eval(
    policy: Annotated[
        Path | None, typer.Option("--policy", help="A Hugging Face folder instead of the newest checkpoint.")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Rollouts of each task.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first so many tasks.")] = None,
    project: ProjectDir = HERE,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure a policy on the validation tasks: pass@1 with its 95 % confidence interval. Without --policy the newest
    checkpoint is measured, or model.path before there is one."""
    chosen = [*(settings or ()), *([f"eval.limit={limit}"] if limit else [])]
    opened = open_project(project, chosen)
    if policy:
        checks.examine_folder(policy)
    if code := checks.require(opened, checks.EVALUATION):
        raise typer.Exit(code)
    arguments = ["--mode", "eval"]
    arguments += ["--policy", str(policy.resolve())] if policy else []
    arguments += ["--samples", str(samples)] if samples else []
    outcome = asyncio.run(run_parts(opened, chosen, command="eval", trainer=arguments))
    measured = outcome.summary["after"] if outcome.summary else None
    if outcome.summary is None or measured is None:
        diagnostics.note("Nothing was measured.")
        raise typer.Exit(outcome.code or diagnostics.FAILED)
    _show(outcome.summary, measured, as_json=as_json)
    raise typer.Exit(outcome.code)


def _show(summary: dict[str, Any], measured: dict[str, Any], *, as_json: bool) -> None:
    found = {"policy": summary["checkpoint"], **measured, "seconds": summary["seconds"]}
    if as_json:
        output.emit_json(found)
        return
    output.emit(f"policy  {found['policy'] or 'served by model.endpoint'}")
    output.emit(
        f"{pass_at_1(measured)}, mean reward {measured['reward_mean']:.3f}, "
        f"{measured['rollouts']} rollouts of {measured['tasks']} tasks in {summary['seconds']:.0f} s"
    )
