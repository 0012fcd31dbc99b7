"""The agent's command line and variables, with the fields of its task put in.

A field is always rendered inside one argument, whatever its text holds: no shell ever reads it. `{a.b}` reaches into
nested values; a value that is no string is written as JSON. What an argument cannot carry is refused with the remedy.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl_runtime.errors import ConfigError

TASK_FILE = "task_file"
MOST_BYTES = 128 * 1024 - 1  # Linux's limit for one argument or variable, less its closing NUL
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_USE_FILE = "Give the agent {task_file}, the path of a JSON file with the whole task, instead."


def split_command(command: str | Sequence[str]) -> list[str]:
    """The templates of the arguments. Raises ConfigError."""
    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise ConfigError(f"agent.command cannot be split into arguments: {error}.", "Close its quotes.") from error
    if not words:
        raise ConfigError("agent.command is empty.", "Say how the agent is started.")
    return words


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """A task's `value`, the `name` that errors call it by, and the path of the file that holds it."""

    value: Any
    name: str
    file: str


def render(template: str, task: TaskPlace, where: str, most_bytes: int = MOST_BYTES) -> str:
    """`template` with every `{field}` replaced. `where` names the setting. Raises ConfigError."""

    def place(match: re.Match[str]) -> str:
        found = match.group(0)
        if found in ("{{", "}}"):
            return found[0]
        path = match.group(1)
        if path is None:
            raise ConfigError(f"{where} holds a single {found}.", "Write {{ and }} for literal braces.")
        return task.file if path == TASK_FILE else _as_text(_look_up(task, path, where))

    text = _PLACE.sub(place, template)
    _check(text, f"{where} of task {task.name}", most_bytes)
    return text


def uses_task_file(templates: Iterable[str]) -> bool:
    return any(path == TASK_FILE for template in templates for path in _PLACE.findall(template))


def _look_up(task: TaskPlace, path: str, where: str) -> Any:
    value, fields = task.value, task.value if isinstance(task.value, Mapping) else {}
    for part in [path] if path in fields else path.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise ConfigError(
                f"Task {task.name} has no field `{path}`, which {where} names; it has {', '.join(fields) or 'none'}.",
                "Correct the name, or write {{ and }} for literal braces.",
            )
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _check(text: str, what: str, most_bytes: int) -> None:
    if "\0" in text:
        raise ConfigError(f"{what} holds a NUL character, which no argument can carry.", _USE_FILE)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} holds half a character ({error.reason}).", _USE_FILE) from error
    if size > most_bytes:
        raise ConfigError(f"{what} is {size} bytes long; an argument or variable holds {most_bytes}.", _USE_FILE)
