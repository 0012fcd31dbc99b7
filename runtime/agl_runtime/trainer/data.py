"""Task files (JSON Lines) and the order in which their tasks are taken.

The order is a function of seed and place alone: group number g of a run is always the same task, so a resumed run
continues where it was without having kept anything but a number.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agl_runtime.errors import ConfigError

ID_FIELDS = ("id", "data_id", "instance_id")


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a task file. `data` is the object as it stands there; `task_id` is unique in its file."""

    task_id: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TaskOrder:
    """Every task once an epoch, shuffled anew for each (or in file order)."""

    tasks: Sequence[Task]
    seed: int
    shuffle: bool

    def at(self, number: int) -> Task:
        """The task of place `number`, counted from 0 through all epochs."""
        epoch, place = divmod(number, len(self.tasks))
        order = list(range(len(self.tasks)))
        if self.shuffle:
            random.Random(f"{self.seed}:{epoch}").shuffle(order)
        return self.tasks[order[place]]


def load_tasks(file: Path, setting: str, limit: int | None = None) -> tuple[Task, ...]:
    """Read a whole task file; the first `limit` tasks count. Raises ConfigError that names `setting` or the line."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"The task file {file} ({setting}) cannot be read: {error.strerror}.", f"Correct {setting} in agl.yaml."
        ) from error
    tasks: list[Task] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        task = _task(line, number, file)
        if task.task_id in line_of:
            raise _wrong(
                file, number, f"has the id {task.task_id!r} of line {line_of[task.task_id]}", "Make ids unique."
            )
        line_of[task.task_id] = number
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"The task file {file} ({setting}) holds no task.", "Give it one JSON object a line.")
    return tuple(tasks[:limit])


def _task(line: bytes, number: int, file: Path) -> Task:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _wrong(file, number, f"is not valid JSON: {error.msg}, column {error.colno}") from error
    if not isinstance(value, dict):
        raise _wrong(file, number, f"holds {_kind(value)}, not an object")
    name = next((field for field in ID_FIELDS if value.get(field) is not None), None)
    if name is None:
        return Task(str(number), value)
    task_id = value[name]
    if isinstance(task_id, bool) or not isinstance(task_id, str | int) or task_id == "":
        raise _wrong(file, number, f"has {_kind(task_id)} as its {name}", "Ids are texts or whole numbers.")
    return Task(str(task_id), value)


def _kind(value: object) -> str:
    names = {
        list: "a list",
        str: "a text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
        dict: "an object",
    }
    return "an empty text" if value == "" else names.get(type(value), "null")


def _wrong(file: Path, number: int, what: str, fix: str = "Write one JSON object a line.") -> ConfigError:
    return ConfigError(f"Line {number} of {file} {what}.", fix)
