"""What `agl init` knows of an agent's execution framework, one module a harness.

A harness module defines `HARNESS`, an object that fulfils `Harness`, and is named in `MODULES`. Harnesses are asked in
that order and the first that finds itself in the repository makes the integration.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agl_cli.patching.edits import Edit

MODULES = ("claude_code", "codex", "python_sdk")


@dataclass(frozen=True, slots=True)
class Tasks:
    """Task files found in the repository, and the fields of their first line that look like input and answer."""

    train: str | None
    val: str | None
    input_field: str | None
    answer_field: str | None


@dataclass(frozen=True, slots=True)
class Repository:
    """`files` are the user's own files, relative to `root`, in sorted order."""

    root: Path
    files: tuple[str, ...]
    tasks: Tasks


@dataclass(frozen=True, slots=True)
class Integration:
    """How to run the agent unchanged against the gateway. `evidence` says why it was recognised; `env` and `models` are
    its agent.env and gateway.models; `notes` are for the user to read before agreeing."""

    harness: str
    evidence: str
    command: tuple[str, ...]
    edits: tuple[Edit, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Harness(Protocol):
    def integrate(self, repository: Repository, command: tuple[str, ...]) -> Integration | None:
        """The integration, or None where this harness is neither in the repository nor in the command that the user
        gave, which is empty where there was none."""
        ...


def task_field(repository: Repository) -> str:
    """What stands for the task in a command."""
    return f"{{{repository.tasks.input_field or 'question'}}}"


def harnesses() -> Iterator[Harness]:
    for name in MODULES:
        yield importlib.import_module(f"agl_cli.harnesses.{name}").HARNESS
