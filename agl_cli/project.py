"""The project that a command works on: its configuration with `--set`, and the files that its parts leave in `.agl`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agl_runtime.config import Project, load_project
from agl_runtime.errors import ConfigError
from agl_runtime.part import METRICS_FILE, SUMMARY_FILE
from agl_runtime.schemas import PolicyVersion

CHECKPOINTS = "checkpoints"


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


def read_metrics(state_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; one that is still being written is left for the next look."""
    try:
        lines = (state_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return list(_objects(lines))


def _objects(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def read_summary(state_dir: Path) -> dict[str, Any] | None:
    """summary.json, or None before the first run has ended."""
    try:
        value = json.loads((state_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def newest_checkpoint(state_dir: Path) -> Path | None:
    """The complete checkpoint of the highest policy version."""
    found: dict[PolicyVersion, Path] = {}
    for folder in (state_dir / CHECKPOINTS).glob("*.*"):
        try:
            found[PolicyVersion.parse(folder.name)] = folder
        except ValueError:
            continue  # one that is still being written
    return found[max(found)] if found else None


def last_of(rows: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    return next((row for row in reversed(rows) if row.get("kind") == kind), None)
