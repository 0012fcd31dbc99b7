"""Looks at a user's repository: its own files, and which of them are tasks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from agl_cli.harnesses.base import Repository, Tasks

SKIPPED_FOLDERS = frozenset(
    {".agl", ".git", ".venv", "venv", "env", "node_modules", "__pycache__", "site-packages", "build", "dist", ".tox"}
)
MOST_FILES = 20_000
INPUT_FIELDS = ("question", "prompt", "instruction", "problem_statement", "problem", "task", "query", "input", "goal")
ANSWER_FIELDS = ("answer", "expected", "expected_answer", "target", "solution", "label", "gold")
HELD_OUT_NAMES = ("val", "valid", "validation", "dev", "test", "eval", "heldout", "held_out")


def look(root: Path, *, train: str | None = None, val: str | None = None) -> Repository:
    """`train` and `val` name the task files where the user has said so."""
    files = _own_files(root)
    task_files = [name for name in files if name.endswith(".jsonl") and _first_task(root / name) is not None]
    held_out = [name for name in task_files if Path(name).stem.lower() in HELD_OUT_NAMES]
    others = [name for name in task_files if name not in held_out]
    others.sort(key=lambda name: ("train" not in name, "task" not in name, name))
    train = train or next(iter(others), None)
    first = (_first_task(root / train) if train else None) or {}
    texts = [key for key, value in first.items() if isinstance(value, str)]
    input_field = next((key for key in INPUT_FIELDS if key in first), None) or next(
        (key for key in texts if key not in ("id", *ANSWER_FIELDS)), None
    )
    answer_field = next((key for key in ANSWER_FIELDS if key in first), None)
    return Repository(root, files, Tasks(train, val or next(iter(held_out), None), input_field, answer_field))


def _own_files(root: Path) -> tuple[str, ...]:
    """What git tracks or would track; without git, all but environments, caches and build output."""
    listing = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0:
        names = [os.fsdecode(name) for name in listing.stdout.split(b"\0") if name]
    else:
        names = [
            str((Path(folder) / name).relative_to(root))
            for folder, folders, files in os.walk(root)
            if _keep(folders)
            for name in files
        ]
    own = [name for name in names if not SKIPPED_FOLDERS & set(Path(name).parts) and (root / name).is_file()]
    return tuple(sorted(own)[:MOST_FILES])


def _keep(folders: list[str]) -> bool:
    """Prunes `folders` in place, as os.walk wants it."""
    folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
    return True


def _first_task(file: Path) -> dict[str, object] | None:
    try:
        with file.open(encoding="utf-8") as lines:
            first = json.loads(next((line for line in lines if line.strip()), "null"))
    except (OSError, ValueError):
        return None
    return first if isinstance(first, dict) else None
