"""What `agl init` knows of an agent's execution framework, one module a harness.

A harness module defines `HARNESS`, an object that fulfils `Harness`, and is named in `MODULES`. Harnesses are asked in
that order and the first that finds itself in the repository makes the integration.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agl_cli.patching.edits import Edit

MODULES = ("python_sdk",)


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
    """How to run the agent unchanged against the gateway. `evidence` says why it was recognised; `notes` are for the
    user to read before agreeing."""

    harness: str
    evidence: str
    command: tuple[str, ...]
    edits: tuple[Edit, ...] = ()
    notes: tuple[str, ...] = ()


class Harness(Protocol):
    def integrate(self, repository: Repository) -> Integration | None:
        """The integration, or None where this harness is not in the repository."""
        ...


def harnesses() -> Iterator[Harness]:
    for name in MODULES:
        yield importlib.import_module(f"agl_cli.harnesses.{name}").HARNESS
