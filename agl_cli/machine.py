"""What can be trained on this machine: estimated seconds a step and memory, in plain words. Imports no torch."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from agl_cli.project import MetricsTail, last_of
from agl_runtime.config import Project
from agl_runtime.controller.capacity import usable_cores
from agl_runtime.trainer.estimate import count_parameters, estimate, memory_bytes

BEARABLE_STEP_S = 600.0
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one step would be. `seconds` is of the policy's own work on the CPU (agents take theirs besides), None on a
    GPU, whose speed is not estimated. `largest` is the most parameters that fit and take at most BEARABLE_STEP_S."""

    parameters: int
    rollouts: int
    tokens: int
    seconds: float | None
    needs_bytes: int
    has_bytes: int
    largest: int
    gpu: Gpu | None

    @property
    def fits(self) -> bool:
        return self.needs_bytes <= self.has_bytes


def find_gpu() -> Gpu | None:
    """The first NVIDIA GPU that its driver names."""
    return next(iter(find_gpus()), None)


def find_gpus() -> list[Gpu]:
    """All NVIDIA GPUs that their driver names."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        rows = [line.rsplit(",", 1) for line in done.stdout.splitlines()]
        return [Gpu(name.strip(), int(mebibytes) * 2**20) for name, mebibytes in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []  # a driver that does not answer is no GPU to train on


def outlook(project: Project, folder: Path) -> Outlook:
    """Raises ConfigError for a folder without readable weights."""
    train = project.config.train
    parameters = count_parameters(folder)
    rollouts = train.groups_per_step * train.group_size
    tokens = rollouts * tokens_a_rollout(project)
    gpu = find_gpu() if train.device != "cpu" else None
    has_bytes = gpu.memory_bytes if gpu else int(psutil.virtual_memory().total)
    fixed_s = estimate(0, tokens, train.threads)
    each_s = estimate(1, tokens, train.threads) - fixed_s
    return Outlook(
        parameters=parameters,
        rollouts=rollouts,
        tokens=tokens,
        seconds=None if gpu else estimate(parameters, tokens, train.threads),
        needs_bytes=memory_bytes(parameters, with_reference=train.kl_coef > 0),
        has_bytes=has_bytes,
        largest=max(0, min(int((BEARABLE_STEP_S - fixed_s) / each_s), has_bytes * 1000 // memory_bytes(1000))),
        gpu=gpu,
    )


def tokens_a_rollout(project: Project) -> int:
    """What the last step sampled a rollout; before any, one full answer."""
    row = last_of(MetricsTail(project.state_dir).read(), "step")
    if row and row["sampled_tokens"]:
        return max(1, int(row["sampled_tokens"]) // int(row["rollouts"]))
    return project.config.model.max_tokens


def plain_words(view: Outlook) -> str:
    size = f"{amount(view.parameters)} parameters"
    needs = f"about {gib(view.needs_bytes)} of {gib(view.has_bytes)}"
    if view.gpu:
        return f"{size} on {view.gpu.name}: training needs {needs} of GPU memory."
    step = f"{view.rollouts} rollouts of {round(view.tokens / view.rollouts)} tokens"
    return (
        f"{size} on the CPU: about {duration(view.seconds or 0.0)} a step of {step} (agents' own time comes on top), "
        f"and {needs} of memory. Without a GPU this machine ({usable_cores():g} cores) trains policies of up to "
        f"{amount(view.largest)} parameters like this in under {duration(BEARABLE_STEP_S)} a step, and no larger ones."
    )


def amount(count: float) -> str:
    for size, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:.0f}"


def gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
