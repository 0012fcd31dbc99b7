"""Renders docs/cli.md from the app and docs/configuration.md from the settings' docstrings.

    python -m agl_cli.reference        writes both into docs/ of the source checkout

A test fails when a file there is not what is rendered here, when a setting has no docstring, or when a command has
`--json` and no entry in `JSON_KEYS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

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
    Any: "value",
}
ROLLOUT_KEYS = {
    "rollout_id": "its id",
    "state": "queuing, running, succeeded or failed",
    "mode": "train or val",
    "step": "the step for which the trainer enqueued it, or null",
    "task_id": "the id of its task",
    "reward": "the last reward, or null",
    "error": "why it failed, or null",
}
SCORE = "{pass_at_1, ci_low, ci_high, reward_mean, tasks, rollouts}"
JSON_KEYS: dict[str, dict[str, str]] = {
    "agl demo": {
        "seed": "--seed",
        "before": "pass@1 before training, or null",
        "after": "pass@1 after training, or null",
        "before_ci": "(where it was measured) its 95 % confidence interval, [low, high]",
        "after_ci": "likewise",
        "steps, seconds, train_seconds, checkpoint, ended, reason": "as of `agl up`",
        "logprob_gap_max, agent_cpu_s_total, update_s_total": "as of `agl up`",
    },
    "agl init": {
        "harness": "what was found",
        "command": "how the agent is started, as a list of arguments",
        "written": "whether anything was written",
        "files": "the files that were or would be written",
        "notes": "sentences to read",
        "restored": "(only with --undo, with the next two alone) the files as they were before",
        "removed": "the files that were new",
        "kept": "new files edited since, now below .agl/init/edited",
    },
    "agl run": {
        "(all keys)": "those of `agl rollouts show`",
        "network": "(only with --prove) {interfaces, refused}: what the namespace had, and sends that sought a way out",
    },
    "agl up": {
        "run_id": "the run, which goes on when `agl up` is run again",
        "mode": "train",
        "seed": "train.seed",
        "before": f"the validation before the first step, {SCORE}, or null",
        "after": "the validation after the last step, likewise",
        "steps": "steps done",
        "seconds": "of the run over all its processes",
        "train_seconds": "the same without the validations",
        "checkpoint": "folder of the newest checkpoint, or null",
        "version": "policy version: run epoch and updates",
        "ended": "complete, stopped, no_signal or failed",
        "reason": "a sentence, or null",
        "agent_cpu_s_total": "CPU seconds of all agents",
        "update_s_total": "seconds of the device in updates",
        "logprob_gap_max": "largest difference between recorded and recomputed log-probabilities",
        "finished_at": "seconds since the epoch",
        "(with --dry-run)": "instead {gateway, controller, trainer}: each part's arguments; {verl}: what verl is told",
    },
    "agl status": {
        "running": "null when nothing runs, else {command, pid, seconds}",
        "parts": "what each part says of itself: [{part, pid, state, waiting_for, detail, updated_at}]",
        "rollouts": "recorded rollouts by state; this and the next three are null unless the gateway runs",
        "running_calls": "model calls that have no answer yet",
        "trainable_calls": "model calls that can be trained on",
        "untrainable_calls": "the other model calls, by reason",
        "last_step": "the newest step line of metrics.jsonl, or null",
        "last_validation": "the newest validation line of metrics.jsonl, or null",
        "summary": "summary.json of the last run that ended, or null",
    },
    "agl rollouts ls": ROLLOUT_KEYS,
    "agl rollouts show": ROLLOUT_KEYS
    | {
        "reward_parts": "named parts of the reward",
        "attempts": "ids of its attempts; all else is of the last one",
        "task": "the task as the agent got it",
        "agent": "how the agent ended: exit_code, signal, timed_out, over_disk, duration_s, cpu_s, max_rss_mb, ...",
        "calls": "[{call_id, model, kind, prompt_tokens, sampled_tokens, versions, trainable, reason, finish_reason, "
        "http_status, latency_ms, error}]; `model` is the name that was asked for, `kind` main or auxiliary, `error` "
        "the first line of what the agent was told instead of an answer",
        "incomplete_calls": "ids of calls that were sent on and whose answer was never recorded",
        "samples": "what training would build: [{tokens, trained_tokens, calls, split, truncated, broke}]; `broke`: "
        "{cause, call, earlier (which it does not continue), before (text of both), was, now (how they go on)} or null",
        "report": "counts: {calls, sampled_tokens, trained_tokens, splits, untrained, dropped}",
        "continuity": "whose it is and what to do about splits: {harness, template, dialects, remedies by cause}",
        "conversations": "a list of chat messages for each sample; without samples, for each main conversation",
    },
    "agl export": {
        "version": "the policy version that was written",
        "step": "after which step it was saved",
        "folder": "where it was written",
    },
    "agl eval": {
        "policy": "the folder measured, or null for model.endpoint",
        "pass_at_1": "mean over tasks of the share of their rollouts with reward 1 or more",
        "ci_low": "lower end of its 95 % confidence interval",
        "ci_high": "upper end",
        "reward_mean": "mean reward",
        "tasks": "tasks with a reward",
        "rollouts": "rollouts with a reward",
        "seconds": "how long it took",
    },
    "agl doctor": {
        "ready": "whether nothing that is needed is missing or wrong",
        "checks": "[{name, state (ok, warning, failed), what, fix}]",
    },
    "agl config show": {
        "setting": "(a list of objects) the path of a setting, or `verl: ` and verl's name of one",
        "value": "its effective value; secrets are ***",
        "origin": "where it came from: a flag, a variable, agl.yaml, default; of verl's what decides it",
    },
}


def commands(command: Any = None, path: str = "agl") -> Iterator[tuple[str, Any]]:
    """(path, command) of every command that does something, in order of `agl --help`."""
    command = command if command is not None else typer.main.get_command(app)
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        if getattr(inner, "hidden", False):  # another name of one that is shown
            continue
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
    if get_origin(annotation) is Annotated:
        return _kind(inner[0])
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
