"""`agl init`: shows what it would change in the agent's folder, and changes it when told to."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_cli import diagnostics, output
from agl_cli.options import HERE, AsJson
from agl_cli.patching import edits
from agl_cli.scaffold import Answers, Plan, make_plan
from agl_runtime.config import STATE_DIR
from agl_runtime.errors import ConfigError
from agl_runtime.part import make_state_dir


def init(
    path: Annotated[Path, typer.Argument(help="The agent's folder.")] = HERE,
    command: Annotated[str | None, typer.Option(help="How the agent is started, with {fields} of the task.")] = None,
    tasks: Annotated[str | None, typer.Option(help="JSON Lines file of training tasks.")] = None,
    val: Annotated[str | None, typer.Option(help="JSON Lines file of held-out tasks.")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face folder of the policy to improve.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write without asking.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Restore every file that `agl init` changed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find the agent's harness and prepare its folder: agl.yaml, a reward function, and only such edits of your own
    files as send its model calls where the environment says."""
    root = path.resolve()
    if not root.is_dir():
        raise ConfigError(f"{path} is not a folder.", "Name the folder of your agent.")
    if undo:
        _show_undone(edits.undo(root, root / STATE_DIR), as_json=as_json)
        return
    plan = make_plan(root, Answers(command, tasks, val, model))
    _show(plan)
    if not plan.edits:
        diagnostics.note("Nothing to change: this folder is prepared.")
    elif not dry_run and not yes and not _agreed():
        raise typer.Exit(diagnostics.FAILED)
    changed = [edit.path for edit in plan.edits]
    written = bool(changed) and not dry_run
    if written:
        _write(root, plan)
        diagnostics.note("Next: `agl doctor` checks all that a run needs, `agl run` tries one task, `agl up` trains.")
    summary = {"harness": plan.integration.harness, "command": list(plan.integration.command), "written": written}
    _report(as_json, {**summary, "files": changed, "notes": list(plan.notes)}, "Wrote" if written else "Would write")


def _show(plan: Plan) -> None:
    diagnostics.note(f"Found: {plan.integration.harness}, {plan.integration.evidence}.")
    if plan.edits:
        diagnostics.note(edits.diff(plan.edits))
    for note in plan.notes:
        diagnostics.note(f"Note: {note}")


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("There is no terminal to ask on.", "Use --yes to write, or --dry-run to look.")
    return typer.confirm("Write these changes?", err=True)


def _write(root: Path, plan: Plan) -> None:
    state_dir = root / STATE_DIR
    make_state_dir(state_dir)
    edits.apply(root, state_dir, plan.edits)


def _show_undone(undone: edits.Undone, *, as_json: bool) -> None:
    if as_json:
        output.emit_json(asdict(undone))
        return
    for name in undone.restored:
        output.emit(f"Restored {name}")
    for name in undone.removed:
        output.emit(f"Removed {name}")
    for name in undone.kept:
        output.emit(f"Removed {name}; as you had edited it, it is kept as {STATE_DIR}/init/{edits.EDITED}/{name}")


def _report(as_json: bool, data: dict[str, Any], verb: str) -> None:
    if as_json:
        output.emit_json(data)
        return
    for name in data["files"]:
        output.emit(f"{verb} {name}")
