"""The project that a command works on: its configuration with `--set`, and the files that its parts leave in `.agl`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agl_runtime.config import Project, load_project
from agl_runtime.errors import ConfigError
from agl_runtime.part import METRICS_FILE, SUMMARY_FILE


def open_project(directory: Path, settings: Sequence[str] | None = None) -> Project:
    """Raises ConfigError."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no folder.", "Name the folder of your agent with --project.")
    return load_project(directory, overrides=parse_settings(settings or ()))


def parse_settings(settings: Sequence[str]) -> dict[str, str]:
    """`path=value` items, of which the last of a path counts. Raises ConfigError."""
    for item in settings:
        if not item.partition("=")[1] or not item.partition("=")[0].strip():
            raise ConfigError(f"--set {item} names no value.", "Write it as --set train.lr=1e-5.")
    return {path.strip(): value for path, _, value in (item.partition("=") for item in settings)}


class MetricsTail:
    """The rows of metrics.jsonl that were not read before. A trainer that resumes writes the file anew without the
    rows past its checkpoint; those it kept are not read again. A line still being written is left for later."""

    def __init__(self, state_dir: Path, *, from_end: bool = False) -> None:
        self._file = state_dir / METRICS_FILE
        self._seen: set[tuple[Any, ...]] = set()
        self._inode: int | None = None
        self._offset = 0
        if from_end:
            self.read()

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._file.open("rb") as handle:
                inode = os.fstat(handle.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                handle.seek(self._offset)
                whole = handle.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._offset += len(whole) + 1 if whole else 0
        rows = {_row_key(row): row for row in _objects(whole.splitlines())}
        fresh = [row for key, row in rows.items() if key not in self._seen]
        self._seen.update(rows)
        return fresh


def _row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("run_id", "kind", "step", "elapsed_s"))


def _objects(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue  # cut by a crash
        if isinstance(value, dict):
            yield value


def read_summary(state_dir: Path) -> dict[str, Any] | None:
    """summary.json, or None before the first run has ended."""
    try:
        value = json.loads((state_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def last_of(rows: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    return next((row for row in reversed(rows) if row.get("kind") == kind), None)
