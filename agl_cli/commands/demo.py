"""`agl demo`: the example agent in a fresh folder, trained on this machine's CPU."""

from __future__ import annotations

import asyncio
import importlib.util
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_cli import checks, diagnostics, output
from agl_cli.options import AsJson, Settings
from agl_cli.preload import modules_to_preload
from agl_cli.progress import BAR_WIDTH, bar, pass_at_1
from agl_cli.project import MetricsTail, open_project
from agl_cli.resources import resource
from agl_cli.training import Outcome, run_parts
from agl_runtime.config import CONFIG_NAME, STATE_DIR, Project
from agl_runtime.errors import ConfigError, PreconditionError

EXAMPLE = "examples/calculator"
COPIED = ("agent.py", "reward.py", CONFIG_NAME, "tasks", "policy", "README.md")
MARK = "demo"
"""A file in the state folder of what `agl demo` made: only such a folder is ever replaced."""


def demo(
    path: Annotated[Path, typer.Argument(help="Folder to make; one that is there already is resumed.")] = Path(
        "agl-demo"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seeds data order and sampling.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin again: replace the folder of an earlier demo.")] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Put the calculator agent into a fresh folder, train its small policy on this machine's CPU with real agent
    processes, and measure it on held-out tasks before and after. With --json stdout ends with one line of JSON."""
    _make(path, fresh=fresh)
    chosen = [f"train.seed={seed}", *(settings or ())]
    project = open_project(path, chosen)
    if code := checks.require(project, checks.training_for(project)):
        raise typer.Exit(code)
    diagnostics.note(f"{path}: an agent that imports openai, its tasks, a reward function, a small warm policy.")
    steps = output.counted(project.config.train.steps, "step")
    diagnostics.note(f"Training for {steps}, seed {seed}. Ctrl-C once stops; rerun to resume.")
    outcome = asyncio.run(run_parts(project, chosen, command="demo"))
    if outcome.summary:
        _show(path, seed, project, outcome, as_json=as_json)
    raise typer.Exit(outcome.code)


def _make(path: Path, *, fresh: bool) -> None:
    """Copy the example, unless an earlier demo is there to be resumed. Raises ConfigError for any other folder."""
    if importlib.util.find_spec("openai") is None:
        raise PreconditionError("The example agent needs the openai package.", "Install it: pip install 'agl[demo]'.")
    is_demo = (path / STATE_DIR / MARK).exists()
    if path.exists() and not is_demo and any(path.iterdir()):
        raise ConfigError(f"{path} is not empty and was not made by `agl demo`.", "Name another folder.")
    if is_demo and not fresh:
        return
    if is_demo:
        shutil.rmtree(path)
    (path / STATE_DIR).mkdir(mode=0o700, parents=True)
    (path / STATE_DIR / MARK).touch()
    for name in COPIED:
        source = resource(f"{EXAMPLE}/{name}")
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, path / name)
    _use_this_python(path)


def _use_this_python(path: Path) -> None:
    """An agent runs with the Python of your PATH; the demo's runs with this one, which has the openai package."""
    config = path / CONFIG_NAME
    text = config.read_text(encoding="utf-8")
    text = text.replace("command: python ", f"command: {shlex.quote(sys.executable)} ", 1)
    modules = ", ".join(modules_to_preload(path, sys.executable, [sys.executable, "agent.py"]))
    config.write_text(text.replace("warm: [openai]", f"warm: [{modules}]", 1), encoding="utf-8")


def _show(path: Path, seed: int, project: Project, outcome: Outcome, *, as_json: bool) -> None:
    summary: dict[str, Any] = outcome.summary or {}
    measured = {name: summary[name] for name in ("before", "after") if summary[name]}
    if as_json:
        found: dict[str, Any] = {"seed": seed, "before": None, "after": None}
        for name, value in measured.items():
            found |= {name: value["pass_at_1"], f"{name}_ci": [value["ci_low"], value["ci_high"]]}
        keys = ("steps", "seconds", "train_seconds", "checkpoint", "ended", "reason", "logprob_gap_max")
        resources = ("agent_cpu_s_total", "update_s_total")
        output.emit_json_line(found | {key: summary[key] for key in keys + resources})
        return
    if summary["reason"]:
        diagnostics.problem(summary["reason"])
    for row in MetricsTail(project.state_dir).read():
        if row.get("kind") == "step" and row.get("reward_mean") is not None:
            output.emit(f"step {row['step']:>3}  {bar(row['reward_mean']):<{BAR_WIDTH}}  {row['reward_mean']:.2f}")
    for name, value in measured.items():
        output.emit(f"{name:<7} {pass_at_1(value)} on {value['tasks']} held-out tasks")
    steps = output.counted(summary["steps"], "step")
    output.emit(f"{steps} in {summary['train_seconds']:.0f} s, {summary['seconds']:.0f} s in all")
    if summary["checkpoint"]:
        output.emit(f"checkpoint: {summary['checkpoint']}")
    if outcome.code == diagnostics.DONE:
        agl = Path(sys.executable).with_name("agl")
        diagnostics.note(f"Next: cd {path}; {agl} rollouts ls; {agl} eval. In your own agent's folder: {agl} init.")
