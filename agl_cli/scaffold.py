"""What `agl init` would do in a repository: a plan of edits, made without writing anything."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import jinja2
import yaml

from agl_cli.harnesses.base import Integration, Repository, harnesses
from agl_cli.harnesses.repository import look
from agl_cli.patching.edits import Edit
from agl_cli.preload import modules_to_preload
from agl_cli.resources import resource
from agl_runtime.config import CONFIG_NAME
from agl_runtime.controller.runners.environment import Installation, user_path
from agl_runtime.errors import ConfigError

_PLAIN = re.compile(r"[\w@%+=:,./{}-]+")
REWARD_FILES = ("reward.py", "agl_reward.py")


@dataclass(frozen=True, slots=True)
class Answers:
    """What the user said on the command line; None where it is to be found out."""

    command: str | None = None
    train: str | None = None
    val: str | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    integration: Integration
    edits: tuple[Edit, ...]
    notes: tuple[str, ...]


def make_plan(root: Path, answers: Answers) -> Plan:
    """Raises ConfigError when no harness is found and no command was given, or a named file is missing."""
    for name in (answers.train, answers.val, answers.model):
        if name and not (root / name).exists():
            raise ConfigError(f"{root / name} does not exist.", "Name files relative to the agent's folder.")
    repository = look(root, train=answers.train, val=answers.val)
    integration = _integration(repository, answers)
    edits = list(integration.edits)
    notes = list(integration.notes)
    if not (root / CONFIG_NAME).exists():
        reward_file = _reward_file(root)
        edits.append(_new(CONFIG_NAME, _config(repository, integration, answers, reward_file)))
        if not (root / reward_file).exists():
            edits.append(_new(reward_file, _render("reward.py.j2", answer=repository.tasks.answer_field)))
        notes += _missing(repository, answers)
    return Plan(integration, tuple(edits), tuple(notes))


def _integration(repository: Repository, answers: Answers) -> Integration:
    command = tuple(shlex.split(answers.command or ""))
    for harness in harnesses():
        if (found := harness.integrate(repository, command)) is not None:
            return found
    if command:
        return Integration("any command", "given by --command", command)
    raise ConfigError(
        f"No agent that agl knows was found in {repository.root}.",
        'Say how it is started: agl init --command "python my_agent.py {question}".',
    )


def _config(repository: Repository, integration: Integration, answers: Answers, reward_file: str) -> str:
    return _render(
        "agl.yaml.j2",
        command=_yaml(" ".join(part if _PLAIN.fullmatch(part) else shlex.quote(part) for part in integration.command)),
        env={name: _yaml(value) for name, value in integration.env.items()},
        models=integration.models and json.dumps(dict(integration.models)),
        warm=", ".join(_preloads(repository, integration)),
        reward=f"{reward_file}:reward",
        train=_yaml(repository.tasks.train),
        val=_yaml(repository.tasks.val),
        model=_yaml(answers.model),
    )


def _preloads(repository: Repository, integration: Integration) -> list[str]:
    program = integration.command[0]
    found = shutil.which(program, path=user_path(os.environ, Installation.current()))
    python = found or str(repository.root / program)
    return modules_to_preload(repository.root, python, integration.command)


def _yaml(value: str | None) -> str | None:
    """The value as YAML writes it on one line."""
    return yaml.safe_dump(value, width=2**20).removesuffix("\n").removesuffix("\n...") if value else None


def _render(name: str, **values: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resource("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        autoescape=False,  # what is rendered is YAML and Python, for the user to read
    )
    return environment.get_template(name).render(**values)


def _new(path: str, text: str) -> Edit:
    return Edit(path, None, text.encode())


def _reward_file(root: Path) -> str:
    """The first usual name that is free, or that already defines `reward`."""
    for name in REWARD_FILES:
        if not (root / name).exists() or _defines_reward((root / name).read_text(encoding="utf-8")):
            return name
    raise ConfigError(f"{' and '.join(REWARD_FILES)} exist and define no `reward`.", "Add a function `reward` to one.")


def _defines_reward(source: str) -> bool:
    try:
        nodes = ast.parse(source).body
    except SyntaxError:
        return False
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "reward" for node in nodes)


def _missing(repository: Repository, answers: Answers) -> list[str]:
    notes = []
    if repository.tasks.train is None:
        example = json.dumps({"id": "1", "question": "...", "answer": "..."})
        notes.append(
            f"No task file was found: write one, a JSON object a line such as {example}, and name it in agl.yaml."
        )
    if answers.model is None:
        notes.append("Say which policy to improve: model.path in agl.yaml, a Hugging Face folder.")
    if repository.tasks.answer_field is None and not (repository.root / _reward_file(repository.root)).exists():
        notes.append("No field with an expected answer was found: write in reward.py what a good outcome is.")
    return notes
