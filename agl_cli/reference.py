"""Renders docs/cli.md from the app and docs/configuration.md from the settings' docstrings.

    python -m agl_cli.reference        writes both into docs/ of the source checkout

A test fails when a file there is not what is rendered here, when a setting has no docstring, or when a command has
`--json` and no entry in `JSON_KEYS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic import SecretStr

from agl_cli.main import app
from agl_cli.output import compact
from agl_runtime.config import Config

INTRODUCTION = """\
# Commands

Data goes to stdout, all else to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 a precondition
is missing, 130 interrupted. An error is one sentence of what is wrong and one of what to do; `AGL_CLI_DEBUG=1` adds the
traceback. Tables are drawn on a terminal and plain elsewhere; `NO_COLOR` is respected. Programs read `--json`, whose
keys are listed here and stay as they are.
"""
CONFIGURATION = """\
# Settings

A flag (`--set train.lr=1e-4`) beats an environment variable (`AGL_CFG_TRAIN__LR=1e-4`: the path in capitals with two
underscores between levels), which beats `agl.yaml`, which beats the default. Values are read as YAML. An unknown key is
an error that names the nearest known one. Relative paths are relative to the folder of agl.yaml.
"""


WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    SecretStr: "secret",
    NoneType: "null",
}
JSON_KEYS: dict[str, dict[str, str]] = {
    "agl status": {
        "running": "null when nothing runs, else {command, pid, seconds}",
        "parts": "what each part says of itself: [{part, pid, state, waiting_for, detail, updated_at}]",
        "rollouts": "rollouts by state",
        "trainable_calls": "model calls that can be trained on",
        "untrainable_calls": "the other model calls, by reason",
        "last_step": "the newest step line of metrics.jsonl, or null",
        "last_validation": "the newest validation line of metrics.jsonl, or null",
        "summary": "summary.json of the last run that ended, or null",
    },
    "agl config show": {
        "setting": "(a list of objects) the path of a setting",
        "value": "its effective value; secrets are ***",
        "origin": "where it came from: a flag, a variable, agl.yaml, default",
    },
}


def commands(command: Any = None, path: str = "agl") -> Iterator[tuple[str, Any]]:
    """(path, command) of every command that does something, in order of `agl --help`."""
    command = command if command is not None else typer.main.get_command(app)
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        yield from commands(inner, f"{path} {name}")


def cli_markdown() -> str:
    return "\n".join([INTRODUCTION, *(_command(path, command) for path, command in commands())])


def _command(path: str, command: Any) -> str:
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    words = [_value_name(item) if item.required else f"[{_value_name(item)}]" for item in arguments]
    usage = " ".join([path, "[OPTIONS]", *words])
    lines = [f"## {path}", "", " ".join(command.help.split()), "", f"    {usage}", ""]
    lines += [_parameter(item) for item in command.params if "--help" not in item.opts]
    if path in JSON_KEYS:
        lines += ["", "`--json`:", "", *(f"- `{key}`: {meaning}" for key, meaning in JSON_KEYS[path].items())]
    return "\n".join(lines) + "\n"


def _parameter(item: Any) -> str:
    """Written from the declaration, not by Typer, whose wording differs between its releases."""
    option = item.param_type_name == "option"
    value = "" if option and item.is_flag else _value_name(item)
    name = f"{', '.join(item.opts)} {value}".strip() if option else value
    default = "" if item.default in (None, False, Path()) or callable(item.default) else f" (default {item.default})"
    return f"- `{name}`: {item.help}{default}"


def _value_name(item: Any) -> str:
    return str(item.metavar or item.name.upper())


def configuration_markdown() -> str:
    blocks = [CONFIGURATION]
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        blocks.append(f"## {name}\n")
        blocks += [_setting(f"{name}.{key}", value) for key, value in section.model_fields.items()]
        blocks.append("")
    return "\n".join(blocks)


def _setting(path: str, field: Any) -> str:
    default = "required" if field.is_required() else f"default `{_default(field)}`"
    limits = "".join(f", {_limit(item)}" for item in field.metadata)
    text = " ".join((field.description or "").split())
    return f"- **`{path}`** ({_kind(field.annotation)}{limits}; {default}): {text}"


def _kind(annotation: Any) -> str:
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{choice}`" for choice in inner)
    if get_origin(annotation) in (list, tuple):
        return f"list of {_kind(inner[0])}s"
    if get_origin(annotation) is dict:
        return f"mapping to {_kind(inner[1])}s"
    return " or ".join(map(_kind, inner)) if inner else WORDS[annotation]


def _default(field: Any) -> str:
    return compact(field.get_default(call_default_factory=True))


def _limit(item: Any) -> str:
    """A bound as pydantic keeps it: an object with one of ge, gt, le, lt."""
    signs = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    return ", ".join(f"{words} {getattr(item, name)}" for name, words in signs.items() if hasattr(item, name))


def main() -> None:
    docs = Path(__file__).parent.parent / "docs"
    for name, text in RENDERED.items():
        (docs / name).write_text(text(), encoding="utf-8")


RENDERED = {"cli.md": cli_markdown, "configuration.md": configuration_markdown}

if __name__ == "__main__":
    main()
