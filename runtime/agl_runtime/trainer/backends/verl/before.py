"""The model and the cluster that a run was given, looked at before Ray starts.

What is wrong with them verl tells only minutes later, in the words of whatever library met it.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from agl_runtime.errors import ConfigError, PreconditionError

CLUSTER_PATIENCE_S = 10.0


def require_model(model: Any) -> None:
    """`model` is verl's section of it. Raises ConfigError for a file that was cut off, or an unknown architecture."""
    from safetensors import SafetensorError, safe_open
    from transformers import AutoConfig

    try:
        if not model.external_lib:  # which may bring the architecture
            AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, local_files_only=True)
        for file in Path(model.path).glob("*.safetensors"):
            with safe_open(file, "pt"):
                continue
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigError(f"The model in {model.path} does not load: {reason}.", "Fetch or save it again.") from error


def require_answer(address: str) -> None:
    """Ray waits for minutes, deaf to a stop. Raises PreconditionError when nothing listens at a host:port."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:  # `auto`, `local`, or a URL, which are Ray's to read
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CLUSTER_PATIENCE_S).close()
    except OSError as error:
        raise PreconditionError(
            f"No Ray answers at {address}: {error.strerror or error}.",
            "Start it, or unset RAY_ADDRESS to have agl start Ray on this machine.",
        ) from error
