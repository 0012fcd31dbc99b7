"""`agl up`: gateway, controller and trainer together, with live progress, until the run is done or stopped."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from agl_cli import checks, diagnostics, output, training, verl
from agl_cli.options import HERE, AsJson, ProjectDir, Settings
from agl_cli.progress import pass_at_1
from agl_cli.project import open_project
from agl_cli.runstate import private_folder, read_record, refuse_second
from agl_runtime.config import Project
from agl_runtime.part import GATEWAY_FILE

DETACHED_START_S = 60.0
ANNOUNCED = (
    "model",
    "training tasks",
    "validation tasks",
    "training",
    "verl",
    "verl settings",
    "tool parser",
    "isolation",
)


def up(
    project: ProjectDir = HERE,
    settings: Settings = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run in the background; see status and logs.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print what would run, and end.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train the policy. One Ctrl-C (or SIGTERM) stops gracefully, with exit code 130, and a second one kills; run it
    again to resume. With --json stdout holds one object when the run has ended, the content of .agl/summary.json."""
    opened = open_project(project, settings)
    findings = checks.examine(opened, checks.training_for(opened))
    if code := checks.refuse(findings):
        raise typer.Exit(code)
    for finding in findings:
        if finding.name in ANNOUNCED:
            diagnostics.note(f"{finding.name}: {finding.what}")
    if verl.is_chosen(opened) and not (dry_run and as_json):
        _note_verl(opened, whole=dry_run)
    if dry_run:
        _show_commands(opened, settings or (), as_json=as_json)
    elif detach:
        _detach(opened, settings or ())
    else:
        outcome = asyncio.run(training.run_parts(opened, settings or (), command="up"))
        if outcome.summary:
            _show_summary(outcome.summary, as_json=as_json)
        raise typer.Exit(outcome.code)


def _note_verl(project: Project, *, whole: bool) -> None:
    """What verl is told: the `whole` of it, or what the user decided."""
    rows = verl.effective(project)
    shown = [row for row in rows if whole or verl.is_users(project, row)]
    for row in shown:
        diagnostics.note(f"{row['setting']} = {output.compact(row['value'])}")
    if len(shown) < len(rows):
        diagnostics.note(f"verl: and {len(rows) - len(shown)} that you did not set; `agl up --dry-run` lists all")


def _show_commands(project: Project, settings: Sequence[str], *, as_json: bool) -> None:
    commands = {command.name: list(command.argv) for command in training.part_commands(project, settings)}
    if as_json:
        output.emit_json(commands | ({"verl": verl.told(project)} if verl.is_chosen(project) else {}))
    else:
        for argv in commands.values():
            output.emit(shlex.join(argv))


def _show_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    if summary["reason"]:
        diagnostics.note(summary["reason"])
    if as_json:
        output.emit_json(summary)
        return
    steps = output.counted(summary["steps"], "step")
    more = "; the same command goes on" if summary["ended"] == "stopped" else ""
    output.emit(f"{summary['ended'].replace('_', ' ')} after {steps}, {summary['seconds']:.0f} s{more}")
    for name in ("before", "after"):
        if summary[name]:
            output.emit(f"{name:<11} {pass_at_1(summary[name])} on {summary[name]['tasks']} tasks")
    if summary["checkpoint"]:
        output.emit(f"checkpoint  {summary['checkpoint']}")


def _detach(project: Project, settings: Sequence[str]) -> None:
    """Start `agl up` in a session of its own and wait until it runs, or has ended."""
    refuse_second(project.state_dir)
    log_file = private_folder(project.state_dir, "logs") / "up.log"
    words = [sys.executable, "-m", "agl_cli.main", "up", "--project", str(project.root)]
    words += [word for item in settings for word in ("--set", item)]
    with log_file.open("wb") as log:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    give_up_at = time.monotonic() + DETACHED_START_S
    while not _runs(project, child.pid) and time.monotonic() < give_up_at:
        if (code := child.poll()) is not None:
            diagnostics.note(log_file.read_text(encoding="utf-8", errors="replace").rstrip())
            raise typer.Exit(code)
        time.sleep(0.1)
    diagnostics.note(f"Running in the background (process {child.pid}).")
    diagnostics.note("See `agl status` and `agl logs -f`; `agl down` stops it.")


def _runs(project: Project, pid: int) -> bool:
    record = read_record(project.state_dir)
    return record is not None and record.holder.pid == pid and (project.state_dir / GATEWAY_FILE).exists()
