"""`agl doctor`: every precondition with its remedy, and what this machine can train."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import typer

from agl_cli import checks, diagnostics, output
from agl_cli.checks import Finding
from agl_cli.commands import status
from agl_cli.continuity import Continuity, origin_of
from agl_cli.options import HERE, AsJson, ProjectDir, Settings
from agl_cli.project import open_project
from agl_cli.recorded import recent
from agl_cli.session import open_session
from agl_cli.supervisor import part_command
from agl_runtime.config import Project
from agl_runtime.errors import AglError, ConfigError
from agl_runtime.part import STORE_FILE

CONFIGURATION = "agl.yaml"
LOOKED_AT = 20  # rollouts


def doctor(project: ProjectDir = HERE, settings: Settings = None, as_json: AsJson = False) -> None:
    """Check everything that a run needs, with a remedy for each failure. Exit code 3 when something needed is missing
    or wrong."""
    try:
        opened = open_project(project, settings)
    except ConfigError as error:
        findings = [Finding(CONFIGURATION, "failed", error.what, error.fix, diagnostics.USAGE)]
    else:
        findings = [
            Finding(CONFIGURATION, "ok", str(opened.root / CONFIGURATION)),
            *checks.examine(opened, checks.all_for(opened)),
        ]
        look = asyncio.run(status.look(opened))
        findings += [_calls(look)] if look["rollouts"] is not None else []
        if (opened.state_dir / STORE_FILE).exists():
            findings.append(_continuity(opened))
    _show(findings, as_json=as_json)
    if any(finding.state == "failed" for finding in findings):
        raise typer.Exit(diagnostics.MISSING)


def _calls(look: dict[str, Any]) -> Finding:
    """Of a run that goes on: how many of its calls cannot be trained on, and why."""
    what = f"{look['trainable_calls']} of the recorded calls can be trained on"
    if not look["untrainable_calls"]:
        return Finding("calls", "ok", what)
    reasons = ", ".join(f"{count} {reason}" for reason, count in look["untrainable_calls"].items())
    return Finding(
        "calls", "warning", f"{what}; the others: {reasons}.", "docs/gateway.md says what each reason means."
    )


def _continuity(project: Project) -> Finding:
    """Of the newest rollouts: how many samples each became, why, and the remedy."""
    name = "continuity"
    try:
        found = asyncio.run(_recent(project))
    except AglError as error:
        return Finding(name, "warning", error.what, error.fix)
    if not found.samples:
        return Finding(name, "ok", "no training rollout is recorded that can be trained on")
    what = found.sentence(origin_of(project))
    return Finding(name, "warning", f"{what}.", found.fix) if found.fix else Finding(name, "ok", what)


async def _recent(project: Project) -> Continuity:
    async with open_session(project, [part_command("gateway", project.root, ())], "doctor") as session:
        return await recent(session.client, project, LOOKED_AT)


def _show(findings: list[Finding], *, as_json: bool) -> None:
    ready = all(finding.state != "failed" for finding in findings)
    if as_json:
        rows = [{name: value for name, value in asdict(f).items() if name != "code"} for f in findings]
        output.emit_json({"ready": ready, "checks": rows})
        return
    for finding in findings:
        output.emit(f"{finding.state:<8} {finding.name:<17} {finding.what}")
        if finding.fix:
            output.emit(f"{'':<26} {finding.fix}")
    output.emit("Ready." if ready else "Not ready.")
