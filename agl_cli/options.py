"""Options that several commands share, so that they read and behave the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ProjectDir = Annotated[
    Path, typer.Option("--project", "-C", help="The agent's folder, with agl.yaml in it or above it.", metavar="DIR")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set a value of agl.yaml for this command; repeatable.", metavar="PATH=VALUE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; its keys are in docs/cli.md.")]
HERE = Path(".")
