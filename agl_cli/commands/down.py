"""`agl down`: stop what runs for this project, gracefully, by the processes that were recorded at their start."""

from __future__ import annotations

import typer

from agl_cli import diagnostics, runstate
from agl_cli.options import HERE, ProjectDir
from agl_cli.project import open_project


def down(project: ProjectDir = HERE) -> None:
    """Stop what runs here. What was recorded and trained is kept, and `agl up` resumes."""
    record = runstate.left_record(open_project(project).state_dir)
    stopped = runstate.end(record) if record else None
    if record is None or stopped is None:
        diagnostics.note("Nothing runs here.")
    elif stopped:
        diagnostics.note(f"Stopped `agl {record.command}`.")
    else:
        diagnostics.problem(f"`agl {record.command}` has not stopped yet.", "Run `agl down` again, or see `agl logs`.")
        raise typer.Exit(diagnostics.FAILED)
