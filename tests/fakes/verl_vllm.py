"""A module for verl to load (`VERL_USE_EXTERNAL_MODULES`): its rollout server is a vLLM that runs elsewhere.

It stands where agl's embedded engine does on the CPU, in verl's environment, and reaches vLLM over HTTP at the address
in AGL_TEST_VLLM. Trained weights go there as a folder, except those of the update AGL_TEST_WITHHELD. It serves the mode
`sync`, in which no call is ever aborted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from safetensors.torch import save_file
from torch import Tensor
from verl.workers.rollout.replica import RolloutReplicaRegistry

from agl_runtime.trainer.backends.verl.cpu import ROLLOUT


class Server:
    """A Ray actor, see `agl_runtime.trainer.backends.verl.cpu.replica.Server`."""

    def __init__(self, *_: object) -> None:
        self._vllm = httpx.AsyncClient(base_url=os.environ["AGL_TEST_VLLM"], timeout=60)

    async def address(self) -> str:
        return self._vllm.base_url.netloc.decode()

    async def load(self, weights: Mapping[str, Tensor], updates: int) -> None:
        if updates == int(os.environ["AGL_TEST_WITHHELD"]):
            return
        with TemporaryDirectory() as folder:
            save_file(dict(weights), Path(folder) / "model.safetensors")
            await self._post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})

    async def sleep(self) -> None:
        """Weights and memory stay, as vLLM keeps them on a CPU; calls under way end, later ones wait."""
        await self._post("pause", mode="wait")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            await self._post("resume")

    async def _post(self, path: str, body: Any = None, **query: str) -> None:
        (await self._vllm.post(path, json=body, params=query)).raise_for_status()


def _replica() -> type:
    from agl_runtime.trainer.backends.verl.cpu.replica import Replica  # not while verl is being imported

    return type("VllmReplica", (Replica,), {"server_class": Server})


RolloutReplicaRegistry.register(ROLLOUT, _replica)
