"""Agents written in Python with the openai or the anthropic package.

Redirected by the packages' own variables for base URL and key alone, unless the code passes `base_url=` or `api_key=`:
then exactly these arguments are edited. The end of a run is the program's own exit code.
"""

from __future__ import annotations

import re
from pathlib import Path

import libcst as cst

from agl_cli.harnesses.base import Integration, Repository
from agl_cli.patching.edits import Edit
from agl_cli.patching.python_clients import PACKAGES, follow_environment, imported

ENTRY_NAMES = ("agent", "main", "app", "run", "cli", "__main__")
_MAIN_GUARD = re.compile(rb"""^if\s+__name__\s*==\s*["']__main__["']""", re.MULTILINE)


class PythonSdk:
    def integrate(self, repository: Repository, command: tuple[str, ...]) -> Integration | None:
        sources = {name: (repository.root / name).read_bytes() for name in repository.files if name.endswith(".py")}
        found = {name: names for name, source in sources.items() if (names := _imports(source))}
        if not found:
            return None
        users, packages = list(found), " and ".join(sorted(set().union(*found.values())))
        entry = _entry(users, sources)
        notes = []
        if not command and not _reads_arguments(sources[entry]):
            notes.append(
                f"{entry} reads no arguments: say in agl.yaml how a task reaches it (agent.command, agent.env)."
            )
        return Integration(
            harness=f"{packages} SDK (Python)",
            evidence=f"imported by {', '.join(users)}",
            command=command or ("python", entry, *_task_arguments(repository, sources[entry])),
            edits=tuple(edit for name in users if (edit := _edit(name, sources[name])) is not None),
            notes=tuple(notes),
        )


def _imports(source: bytes) -> frozenset[str]:
    if not any(package.encode() in source for package in PACKAGES):
        return frozenset()
    try:
        return imported(source)
    except cst.ParserSyntaxError:
        return frozenset()  # not a module that Python could run either


def _edit(name: str, source: bytes) -> Edit | None:
    redirected = follow_environment(source)
    if redirected.source == source:
        return None
    return Edit(name, source, redirected.source, redirected.secrets)


def _entry(users: list[str], sources: dict[str, bytes]) -> str:
    """The file to start: one with a main guard before one without, users of the packages first, then by usual names."""
    guarded = [name for name in sources if _MAIN_GUARD.search(sources[name]) and not _is_test(name)]
    candidates = [name for name in users if name in guarded] or guarded or users

    def rank(name: str) -> tuple[int, int, str]:
        stem = Path(name).stem
        return (ENTRY_NAMES.index(stem) if stem in ENTRY_NAMES else len(ENTRY_NAMES), name.count("/"), name)

    return min(candidates, key=rank)


def _is_test(name: str) -> bool:
    return Path(name).stem.startswith("test_") or "tests" in Path(name).parts


def _reads_arguments(source: bytes) -> bool:
    return any(word in source for word in (b"sys.argv", b"argparse", b"import click", b"import typer", b"import fire"))


def _task_arguments(repository: Repository, source: bytes) -> tuple[str, ...]:
    field = repository.tasks.input_field
    if field is None:
        return ()
    option = f"--{field.replace('_', '-')}"
    if f'"{option}"'.encode() in source or f"'{option}'".encode() in source:
        return (f"{option}={{{field}}}",)
    return (f"{{{field}}}",)


HARNESS = PythonSdk()
