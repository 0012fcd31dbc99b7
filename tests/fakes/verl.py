"""verl in an environment of its own, on the CPU, and scripts that run there with this repository's code."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from fakes.environments import locked

TESTS = Path(__file__).parents[1]
LOCK = TESTS / "real/verl/requirements.txt"
ENV = {
    "PYTHONPATH": os.pathsep.join((str(TESTS.parent / "runtime"), str(TESTS))),
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "agl_runtime.trainer.backends.verl.plugin",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}


def verl_python() -> Path:
    return locked(LOCK)


def one_rank() -> dict[str, str]:
    """What torchrun would tell the only rank of a run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def run_in_verl(script: Path, *arguments: str | Path, timeout_s: float = 300, **env: str) -> str:
    """What the script said on stdout. The test fails, with the end of its stderr, where the script does."""
    command = [str(verl_python()), str(script), *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **ENV, **env}, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        pytest.fail(f"{script.name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}", pytrace=False)
    return done.stdout
