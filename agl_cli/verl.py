"""What `train.backend: verl` asks of a machine, and what verl would be told. Imports neither verl nor torch.

`effective` is what `agl config show` and `agl up` show. The other functions are checks (`checks.py`) in which the two
backends differ.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from agl_cli import machine, output
from agl_cli.findings import Doubt
from agl_runtime.config import Project
from agl_runtime.errors import PreconditionError
from agl_runtime.trainer import checks as trainer_checks
from agl_runtime.trainer.backends.verl.compose import compose
from agl_runtime.trainer.backends.verl.families import Family, read_family
from agl_runtime.trainer.backends.verl.managed import ROLLOUT, SERVER, decider, passed_through
from agl_runtime.trainer.backends.verl.settings import Paths, for_cpu, overrides
from agl_runtime.trainer.estimate import count_parameters

# agl plugs into this verl by its extension points; the others are those that it was tried with.
PINS = {
    "verl": "0.9.1",
    "ray": "2.52.1",
    "TransferQueue": "0.1.11",
    "tensordict": "0.10.0",
    "transformers": "5.10.4",
}
ON_CPU = {"torch": "2.13.0"}
ON_GPU = {"torch": "2.11.0", "vllm": "0.24.0"}  # this vLLM asks for this torch
# verl asks whether the kernel takes the ends of samples; transformers' own, in its place, takes and ignores them.
LINEAR, STATEFUL = ("flash-linear-attention", "0.5.2"), "qwen3_5"
INSTALL = "Run `make setup-verl` in a clone of agl, or install the versions that docs/verl.md names."
CONSOLE = "console"
OFFLOADS = ("param_offload", "optimizer_offload")
ENGINE_SECTIONS = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.actor.megatron")


def is_chosen(project: Project) -> bool:
    return project.config.train.backend == "verl" and project.config.model.endpoint is None


def on_cpu(project: Project) -> bool:
    device = project.config.train.device
    return device == "cpu" or (device == "auto" and not machine.find_gpus())


def effective(project: Project) -> list[dict[str, Any]]:
    """One object for each key that verl is told: `setting` (verl's name), `value`, `origin` (what of agl decides it).
    Raises ConfigError."""
    return [
        {"setting": f"verl: {key}", "value": value, "origin": decider(key, value, project.config.train.verl)}
        for key, value in told(project).items()
    ]


def is_users(project: Project, row: Mapping[str, Any]) -> bool:
    """Whether the user decided this one of `effective`: in `train.verl`, or by a setting of agl that has a value."""
    return row["origin"] == "train.verl" or any(word in project.origins for word in row["origin"].split())


def told(project: Project) -> dict[str, Any]:
    """What verl is told, by its own names. Raises ConfigError."""
    return {key.lstrip("+"): value for key, value in _overrides(project).items()}


def settings(project: Project) -> str:
    """Those of `train.verl` fit verl's own files, also while the model is still to be fetched. Raises ConfigError, and
    Doubt where the CPU wants other values."""
    config = project.config
    values = passed_through(config.train.verl)
    if importlib.util.find_spec("verl") is None:
        return "not compared with verl's own files, which are not here"
    compose(values)
    wanted = {key.lstrip("+"): value for key, value in for_cpu(config, values).items()} if on_cpu(project) else {}
    said = {key.lstrip("+"): value for key, value in values.items()}
    if untaken := [key for key, value in said.items() if wanted.get(key, value) != value]:
        raise Doubt(f"on the CPU agl decides {', '.join(untaken)} of train.verl.", "They count on GPUs.")
    return f"{output.counted(len(values), 'setting')} in train.verl, of names and kinds that verl knows"


def _overrides(project: Project) -> dict[str, Any]:
    return overrides(project.config, Paths.of(project), _family(project), on_cpu=on_cpu(project))


def _family(project: Project) -> Family:
    return read_family(trainer_checks.policy_folder(project))


def packages(project: Project) -> str:
    """The packages are here, in versions that work together. Another verl is a failure: agl plugs into its parts."""
    pins = PINS | (ON_CPU if on_cpu(project) else ON_GPU)
    found = {name: _version(name) for name in pins}
    if missing := [name for name, version in found.items() if version is None]:
        raise PreconditionError(f"Not installed: {', '.join(missing)}.", INSTALL)
    if not on_cpu(project) and _family(project).model_type.startswith(STATEFUL) and not _version(LINEAR[0]):
        raise PreconditionError(
            f"{LINEAR[0]} is not installed: without it verl lets a Qwen3.5 model's state flow from one packed sample "
            "into the next.",
            f"Run pip install {'=='.join(LINEAR)}.",
        )
    if (version := found["verl"]) != pins["verl"]:
        raise PreconditionError(f"verl {version} is installed; agl works with {pins['verl']}.", INSTALL)
    here = ", ".join(f"{name} {version}" for name, version in found.items())
    others = [f"{name} {pin}" for name, pin in pins.items() if str(found[name]).split("+")[0] != pin]
    if others:
        raise Doubt(f"{here}; agl was tried with {', '.join(others)}.", f"If verl fails: {INSTALL}")
    return here


def trackers(project: Project) -> str:
    """The packages of `train.trackers` are here. None is imported."""
    chosen = project.config.train.trackers
    if missing := [name for name in chosen if name != CONSOLE and not _is_installed(name)]:
        raise PreconditionError(
            f"train.trackers names {', '.join(missing)}, not installed here.",
            f"Run pip install {' '.join(missing)}, or change train.trackers.",
        )
    return ", ".join(chosen) or "none besides metrics.jsonl"


def _is_installed(package: str) -> bool:
    """A mere folder of that name, as trackers leave behind, is found too, but has no file to import."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpu(project: Project) -> str:
    train, found = project.config.train, machine.find_gpus()
    if train.device == "cpu":
        return "none is used: train.device is cpu, which is for trying out"
    if not found and train.device != "cuda":
        raise Doubt(
            "none: verl trains on the CPU, which is for trying out only.",
            "Set train.backend to embedded, or use a machine with an NVIDIA GPU.",
        )
    if len(found) < train.gpus:
        raise PreconditionError(
            f"train.gpus is {train.gpus}; this machine has {len(found)} that its driver names.",
            "Lower train.gpus, or see why `nvidia-smi` does not list the others.",
        )
    if (_version("torch") or "").endswith("+cpu"):
        raise PreconditionError("torch is built for the CPU, and there is a GPU.", INSTALL)
    each = f"{train.gpus} x {found[0].name}, {machine.gib(found[0].memory_bytes)} each"
    return each if train.nodes == 1 else f"{each}, here; Ray joins {train.nodes} such nodes"


def training(project: Project) -> str:
    """verl's settings are in order and, roughly, the weights fit. Raises ConfigError, Doubt."""
    values = told(project)
    parameters, train = count_parameters(trainer_checks.policy_folder(project)), project.config.train
    if on_cpu(project):
        processes = f", in {train.gpus} processes" if train.gpus > 1 else ""
        return f"{machine.amount(parameters)} parameters on this machine's CPU{processes}"
    gpus = machine.find_gpus()
    needs = gpu_bytes(parameters, train.gpus * train.nodes, values)
    has = min((item.memory_bytes for item in gpus), default=0)
    where = output.counted(train.gpus * train.nodes, "GPU")
    what = (
        f"{machine.amount(parameters)} parameters on {where}: weights, gradients and optimizer take about "
        f"{machine.gib(needs)} of {machine.gib(has)} each, activations and key-value cache come on top"
    )
    if needs > has * 0.8:
        raise Doubt(
            f"{what}.",
            "Take more GPUs or a smaller model, or set actor_rollout_ref.actor.fsdp_config.optimizer_offload under "
            "train.verl.",
        )
    return what


def gpu_bytes(parameters: int, gpus: int, values: Mapping[str, Any]) -> float:
    """Of one GPU, roughly: what of weights, gradients (4 bytes each) and two moments (8) is sharded over all GPUs and
    not offloaded, or the servers' weights (2 bytes, sharded over the GPUs of one server), whichever is more: the one
    sleeps while the other works, but for weights and moments that are not offloaded."""
    offloaded = {name for name in OFFLOADS for section in ENGINE_SECTIONS if values.get(f"{section}.{name}")}
    resting = 4.0 * ("param_offload" not in offloaded) + 8.0 * ("optimizer_offload" not in offloaded)
    server = 2.0 * parameters / int(values.get(f"{ROLLOUT}.tensor_model_parallel_size", 1))
    return max(16.0 * parameters / gpus, resting * parameters / gpus + server)


def tool_parser(project: Project) -> str:
    """vLLM is told how this model writes tool calls."""
    values, family = told(project), _family(project)
    if on_cpu(project):
        return "agl's own engine reads tool calls as the chat template writes them"
    if parser := values.get(f"{SERVER}.tool_call_parser"):
        reasoning = values.get(f"{SERVER}.reasoning_parser") or "none"
        return f"{parser}; for reasoning {reasoning}"
    raise Doubt(
        f"agl knows no parser of vLLM for tool calls of a {family.model_type or 'nameless'} model with this template.",
        f"Where agents call tools, set {SERVER}.tool_call_parser and enable_auto_tool_choice under train.verl.",
    )


CHECKS = {"verl": packages, "verl settings": settings, "trackers": trackers, "tool parser": tool_parser}
