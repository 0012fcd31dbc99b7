"""What must be in order before anything starts, each with its remedy: `agl up`, `run` and `eval` refuse on a failure,
`agl doctor` shows all of it.

A check looks at one thing of a project and says in words what it found. It raises `AglError` where the thing is wrong
or missing, and `Doubt` where a run is possible but the user should know something first.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from agl_cli import diagnostics, machine, output, verl, window
from agl_cli.continuity import REMEDIES
from agl_cli.findings import Doubt
from agl_runtime.config import CONFIG_NAME, Project
from agl_runtime.controller.reward import check_reward
from agl_runtime.controller.runners.command import TaskPlace, render, split_command
from agl_runtime.controller.runners.environment import Installation, user_path
from agl_runtime.controller.runners.isolation import choose_isolation, probe_isolation
from agl_runtime.controller.runners.process import ProcessRunner
from agl_runtime.controller.runners.workspace import Repository, own_files
from agl_runtime.errors import AglError, ConfigError, PreconditionError, RewardError, RunnerError
from agl_runtime.trainer import checks as trainer_checks
from agl_runtime.trainer.data import Task, load_tasks
from agl_runtime.trainer.estimate import count_parameters

EMBEDDED = ("torch", "transformers", "safetensors", "jinja2")
LEAST_FREE_BYTES = 2 * 2**30
ANSWER_S = 5.0
SHOWN_FILES = 5
FETCH_AGAIN = "Fetch or save the model again."


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check came to. `code` is the exit code that a failure owes, 0 where there is none."""

    name: str
    state: Literal["ok", "warning", "failed"]
    what: str
    fix: str = ""
    code: int = diagnostics.DONE


Check = Callable[[Project], str]


def examine(project: Project, checks: Mapping[str, Check]) -> list[Finding]:
    """In order of the checks; what an earlier one found to be wrong is not told again."""
    findings: dict[str, Finding] = {}
    for name, check in checks.items():
        finding = _finding(name, check, project)
        findings.setdefault(finding.what if finding.state == "failed" else name, finding)
    return list(findings.values())


def require(project: Project, checks: Mapping[str, Check]) -> int:
    """`refuse` of these checks' findings."""
    return refuse(examine(project, checks))


def refuse(findings: Iterable[Finding]) -> int:
    """Show every failure on stderr; returns the exit code, 0 when all is in order."""
    failures = [finding for finding in findings if finding.state == "failed"]
    for finding in failures:
        diagnostics.problem(finding.what, finding.fix)
    return min((finding.code for finding in failures), default=diagnostics.DONE)


def _finding(name: str, check: Check, project: Project) -> Finding:
    try:
        return Finding(name, "ok", check(project))
    except Doubt as doubt:
        return Finding(name, "warning", doubt.what, doubt.fix)
    except AglError as error:
        code = diagnostics.USAGE if isinstance(error, ConfigError | RewardError) else diagnostics.MISSING
        return Finding(name, "failed", error.what, error.fix, code)


def python(project: Project) -> str:
    return f"{sys.version.split()[0]} at {sys.executable} on {sys.platform}"


def installation(project: Project) -> str:
    """What agl itself requires is there, by its names: without it the parts do not start."""
    required = [re.split(r"[^\w.-]", line)[0] for line in metadata.requires("agl") or () if "extra ==" not in line]
    missing = [name for name in required if not any(metadata.distributions(name=name))]
    if missing:
        raise PreconditionError(
            f"agl needs {', '.join(missing)}, not installed here.", f"Run pip install {' '.join(missing)}."
        )
    return f"agl {metadata.version('agl')} with all that it requires"


def agent_command(project: Project) -> str:
    """The program is there, and every task has the fields that the command names."""
    words = split_command(project.config.agent.command)
    program = words[0]
    found: str | None = program
    if "/" in program:
        found = program if (project.root / program).exists() else None
    elif "{" not in program:
        found = shutil.which(program, path=user_path(os.environ, Installation.current()))
    if found is None:
        raise PreconditionError(
            f"agent.command starts `{program}`, which was not found.",
            "Install it, activate its environment, or write its path.",
        )
    script = words[1] if words[1:] else ""
    is_in_project = script.endswith(".py") and "{" not in script and project.config.agent.workspace != "empty"
    if is_in_project and not (project.root / script).exists():
        raise PreconditionError(f"agent.command runs {script}, which is not there.", "Correct its path.")
    for task in _tasks(project):
        for word in words:
            render(word, TaskPlace(task.data, task.task_id, "task.json"), "agent.command")
    _require_program_of_script(words)
    return found


def _require_program_of_script(words: list[str]) -> None:
    """Asked of the shell, which knows its own commands. Raises Doubt: a script may find its programs elsewhere."""
    started = window.program(words)[0]
    if started == words[0] or not re.fullmatch(r"[\w./+-]+", started):
        return
    environment = os.environ | {"PATH": user_path(os.environ, Installation.current())}
    asked = [words[0], "-c", 'command -v -- "$1"', "sh", started]
    if subprocess.run(asked, env=environment, capture_output=True, check=False).returncode:
        raise Doubt(
            f"agent.command's script starts `{started}`, which was not found.",
            "Install it, activate its environment, or write its path.",
        )


def context(project: Project) -> str:
    """The harness's settings fit into the context that is served, where that is known."""
    model, agent = project.config.model, project.config.agent
    served = model.context
    if served is None and model.endpoint is None:
        settings = _json(trainer_checks.policy_folder(project) / "config.json")
        served = settings.get("text_config", settings).get("max_position_embeddings")
    if served is None:
        return "not known here"
    if misfit := window.misfit(split_command(agent.command), agent.env, served):
        raise Doubt(*misfit)
    return f"{served} tokens"


def _tasks(project: Project) -> Iterable[Task]:
    for name in ("train", "val"):
        if file := getattr(project.config.data, name):
            yield from load_tasks(project.path(file), f"data.{name}")


def workspace(project: Project) -> str:
    kind = project.config.agent.workspace
    repository = Repository.find(project.root) if kind != "empty" else None
    if kind == "worktree" and repository is None:
        raise PreconditionError(
            f"agent.workspace is worktree, but {project.root} is in no git repository.",
            "Run `git init` and commit, or set agent.workspace to copy.",
        )
    if kind == "copy":
        copied = own_files(project.root, repository)
        for word in split_command(project.config.agent.command):
            if (
                os.path.isfile(project.root / word)  # false also of a text too long to be a path
                and not Path(word).is_absolute()
                and os.path.normpath(word) not in copied
            ):
                raise PreconditionError(
                    f"agent.command names {word}, which git does not track, so no agent's workspace would hold it.",
                    f"Run `git add {word}`.",
                )
        config = project.config
        withheld = [config.data.train, config.data.val, config.model.path]
        copied = _without(project, copied, withheld)
        listed = repository.forgotten() if repository and repository.tracked() else []
        read_by_agl = [CONFIG_NAME, (config.reward.function or "").rpartition(":")[0]]
        forgotten = _without(project, listed, [*withheld, *read_by_agl])
        if forgotten:
            raise Doubt(
                f"a copy of the {output.counted(len(copied), 'file')} that git tracks, without "
                f"{', '.join(forgotten[:SHOWN_FILES])}{' and others' if len(forgotten) > SHOWN_FILES else ''}.",
                "Run `git add` for what the agent needs, and list the rest in .gitignore.",
            )
        return f"a copy of the folder's {output.counted(len(copied), 'file')}"
    return {"empty": "empty", "worktree": "a git worktree"}[kind]


def _without(project: Project, files: Iterable[str], left_out: Iterable[str | None]) -> list[str]:
    """The files of the project that are neither those left out nor in such a folder."""
    paths = [project.path(name) for name in left_out if name]
    return [name for name in files if not any((project.root / name).is_relative_to(path) for path in paths)]


def isolation(project: Project) -> str:
    """Tried for real; what it costs is the time of a second trial."""
    choice = choose_isolation(project.config.agent.isolation)
    if choice.kind == "none":
        raise Doubt(
            f"agents are not separated from agl and from each other ({choice.reason}); it is no security boundary.",
            "On Linux install bubblewrap, and run only agents that you trust.",
        )
    began = time.perf_counter()
    probe_isolation((choice.kind,))
    return f"{choice.kind}, which costs each agent about {(time.perf_counter() - began) * 1000:.0f} ms"


def warm_starts(project: Project) -> str:
    """Tried for real."""
    modules = project.config.agent.warm
    if not modules:
        return "off: every agent starts an interpreter of its own"
    began = time.perf_counter()
    refused = asyncio.run(_try_warm(project))
    if refused is not None:
        raise Doubt(f"agents start cold: {refused.what}", refused.fix)
    named = ", ".join(modules) if isinstance(modules, list) else "Python"
    return f"{named}, ready in {time.perf_counter() - began:.1f} s"


async def _try_warm(project: Project) -> RunnerError | None:
    runner = ProcessRunner(project, "http://127.0.0.1", choose_isolation(project.config.agent.isolation))
    try:
        return await runner.try_warm()
    finally:
        runner.close()


def reward(project: Project) -> str:
    trainer_checks.require_reward(project.config)
    if project.config.agent.reports_reward:
        return "reported by the agent"
    check_reward(project)
    return str(project.config.reward.function)


def training_tasks(project: Project) -> str:
    return f"{len(trainer_checks.training_tasks(project).tasks)} in {project.config.data.train}"


def validation_tasks(project: Project) -> str:
    if not project.config.data.val:
        raise Doubt("data.val is not set, so nothing is measured.", "Name a JSON Lines file of held-out tasks.")
    return tasks_to_measure(project)


def tasks_to_measure(project: Project) -> str:
    return f"{len(trainer_checks.tasks_to_measure(project))} in {project.config.data.val}"


def packages(project: Project) -> str:
    if project.config.model.endpoint:
        return "not needed: model.endpoint serves the policy"
    missing = [name for name in EMBEDDED if importlib.util.find_spec(name) is None]
    if missing:
        raise PreconditionError(f"Not installed: {', '.join(missing)}.", 'Run pip install "agl[embedded]".')
    return ", ".join(f"{name} {metadata.version(name)}" for name in EMBEDDED)


def policy(project: Project) -> str:
    if endpoint := project.config.model.endpoint:
        _require_answer(endpoint)
        return f"served by {endpoint}; its weights are not agl's to train"
    folder = trainer_checks.policy_folder(project)
    return f"{folder}: {machine.amount(examine_folder(folder))} parameters"


def chat_template(project: Project) -> str:
    """Tried for real; loading the tokenizer takes seconds."""
    if project.config.model.endpoint:
        return "the model server's own, not tried"
    folder = trainer_checks.policy_folder(project)
    packages(project)
    from agl_runtime.trainer.backends.embedded.template_trial import faults

    try:
        found = faults(folder)
    except Exception as error:  # tokenizers and templates raise anything
        what = f"it could not be tried with tools and a second question: {str(error).rstrip('.')}."
        raise Doubt(what, "Fetch the model again, or use another chat template.") from error
    if found:
        raise Doubt(f"it {'; it '.join(found)}.", REMEDIES["template"])
    return "each turn's prompt begins with that of the turn before"


def _require_answer(endpoint: str) -> None:
    """Any HTTP answer will do: not every model server lists its models."""
    try:
        urllib.request.urlopen(f"{endpoint.rstrip('/')}/models", timeout=ANSWER_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise PreconditionError(
            f"The model server at {endpoint} does not answer: {reason}.", "Start it, or correct model.endpoint."
        ) from error


def examine_folder(folder: Path) -> int:
    """The parameters of a Hugging Face folder that can serve chat completions. Raises ConfigError."""
    _json(folder / "config.json")
    parameters = count_parameters(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(f"{folder} holds no tokenizer.", FETCH_AGAIN)
    settings = folder / "tokenizer_config.json"
    templates = [folder / name for name in ("chat_template.jinja", "chat_template.json")]
    in_settings = settings.is_file() and _json(settings).get("chat_template")
    if not in_settings and not any(file.is_file() for file in templates):
        raise ConfigError(
            f"The tokenizer in {folder} has no chat template.", "Use an instruction-tuned model, or add one."
        )
    return parameters


def _json(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} is no JSON object: {error}.", FETCH_AGAIN) from error


def port(project: Project) -> str:
    host, number = project.config.gateway.host, project.config.gateway.port
    if number == 0:
        return "any free one"
    try:
        socket.create_server((host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise PreconditionError(
            f"The gateway cannot listen on port {number} of {host}: {error.strerror}.",
            "Stop what listens there, or set gateway.port to 0 for any free one.",
        ) from error
    return f"{number} of {host} is free"


def gpu(project: Project) -> str:
    if verl.is_chosen(project):
        return verl.gpu(project)
    found, wanted = machine.find_gpu(), project.config.train.device
    if found is None and wanted == "cuda":
        raise PreconditionError("train.device is cuda, but no NVIDIA GPU was found.", "Set train.device to auto.")
    if found is None:
        return "none: the policy is trained on the CPU"
    return f"{found.name}, {machine.gib(found.memory_bytes)}"


def training(project: Project) -> str:
    """What this machine can train. Too little memory is a failure, a step of more than ten minutes a doubt."""
    if verl.is_chosen(project):
        return verl.training(project)
    view = machine.outlook(project, trainer_checks.policy_folder(project))
    if not view.fits:
        raise PreconditionError(
            f"Training {machine.amount(view.parameters)} parameters needs about {machine.gib(view.needs_bytes)} of "
            f"memory; there are {machine.gib(view.has_bytes)}.",
            "Choose a smaller model.path, or a machine with a larger GPU.",
        )
    if (view.seconds or 0.0) > machine.BEARABLE_STEP_S:
        raise Doubt(machine.plain_words(view), "Choose a smaller model.path, or a machine with a GPU.")
    return machine.plain_words(view)


def disk(project: Project) -> str:
    """Room for the checkpoints that are kept (weights and two moments in fp32) and for recorded calls."""
    free = shutil.disk_usage(project.root).free
    needed = LEAST_FREE_BYTES
    if project.config.model.path and not project.config.model.endpoint:
        folder = trainer_checks.policy_folder(project)
        needed += 12 * count_parameters(folder) * (project.config.train.keep_checkpoints + 1)
    if free < needed:
        raise Doubt(f"{machine.gib(free)} are free, {machine.gib(needed)} are wanted.", "Free some space.")
    return f"{machine.gib(free)} free"


AGENT: dict[str, Check] = {"installation": installation, "agent": agent_command, "workspace": workspace, "port": port}
SERVING: dict[str, Check] = AGENT | {"packages": packages, "model": policy}
SCORING: dict[str, Check] = SERVING | {"reward": reward, "validation tasks": validation_tasks}
EVALUATION: dict[str, Check] = SCORING | {"validation tasks": tasks_to_measure}
TRAINING: dict[str, Check] = (
    {"training tasks": training_tasks} | SCORING | {"gpu": gpu, "training": training, "isolation": isolation}
)
ALL: dict[str, Check] = (
    {"python": python}
    | TRAINING
    | {
        "context": context,
        "chat template": chat_template,
        "warm starts": warm_starts,
        "disk": disk,
    }
)


def training_for(project: Project) -> dict[str, Check]:
    return TRAINING | (verl.CHECKS if verl.is_chosen(project) else {})


def all_for(project: Project) -> dict[str, Check]:
    """Every check that concerns the project: with a model server that is not agl's, nothing is trained."""
    if project.config.model.endpoint is not None:
        return {name: check for name, check in ALL.items() if name in SCORING or name not in TRAINING}
    return ALL | training_for(project)
