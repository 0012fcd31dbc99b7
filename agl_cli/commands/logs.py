"""`agl logs`: what the parts wrote."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from agl_cli import output
from agl_cli.options import HERE, ProjectDir
from agl_cli.project import open_project
from agl_runtime.errors import ConfigError

LOGS = ("gateway", "controller", "trainer", "up")
POLL_S = 0.3


def logs(
    part: Annotated[str | None, typer.Argument(help=f"One of {', '.join(LOGS)}; all when not named.")] = None,
    project: ProjectDir = HERE,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many lines from each log's end.")] = 50,
) -> None:
    """Show the last lines of each part's log, and of a detached `agl up`."""
    if part is not None and part not in LOGS:
        raise ConfigError(f"No part is called {part!r}.", f"Name one of {', '.join(LOGS)}.")
    folder = open_project(project).state_dir / "logs"
    names = (part,) if part else LOGS
    offsets = dict.fromkeys(names, 0)
    for name in names:
        text, offsets[name] = _rest(folder / f"{name}.log", 0)
        _show(name, text[max(0, len(text) - lines) :], prefix=part is None)
    while follow:
        time.sleep(POLL_S)
        for name in names:
            text, offsets[name] = _rest(folder / f"{name}.log", offsets[name])
            _show(name, text, prefix=part is None)


def _rest(file: Path, offset: int) -> tuple[list[str], int]:
    """The whole lines from `offset` on, and where they end; from the start when the log was begun anew."""
    try:
        with file.open("rb") as log:
            start = offset if os.fstat(log.fileno()).st_size >= offset else 0
            log.seek(start)
            whole, newline, _ = log.read().rpartition(b"\n")
    except FileNotFoundError:
        return [], 0
    return whole.decode(errors="replace").splitlines(), start + len(whole) + len(newline)


def _show(name: str, lines: list[str], *, prefix: bool) -> None:
    for line in lines:
        output.emit(f"{name:<10} | {line}" if prefix else line)
