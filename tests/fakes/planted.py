"""Secrets in the shell of a run, and the search for them and for agl's own in what the run left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

MODEL_KEY = "planted-key-of-a-model-server"
AGENT_VALUE = "planted-value-of-agent-env"
WANDB_KEY = "planted0key0of0a0tracker0with0length0040"
SHELL = {
    "AGL_CFG_MODEL__API_KEY": MODEL_KEY,
    "AGL_CFG_AGENT__ENV": json.dumps({"SERVICE_KEY": AGENT_VALUE}),
    "WANDB_API_KEY": WANDB_KEY,
}
PLANTED = {"model.api_key": MODEL_KEY, "agent.env": AGENT_VALUE, "WANDB_API_KEY": WANDB_KEY}
AGENT_KEY = re.compile(rb"agl-agent-[0-9a-f]+\.[0-9a-f]{64}")


def secrets_in(content: bytes, secrets: Mapping[str, str]) -> list[str]:
    """The names of those that `content` has."""
    found = [name for name, value in secrets.items() if value.encode() in content]
    return found + ["an agent's key"] * bool(AGENT_KEY.search(content))


def leaks(folder: Path, secrets: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Each file below `folder` that has a secret, by its path there, with that secret's name."""
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            for name in secrets_in(file.read_bytes(), secrets):
                yield file.relative_to(folder), name
