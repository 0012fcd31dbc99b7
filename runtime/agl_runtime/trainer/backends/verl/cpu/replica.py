"""agl's embedded engine as one of verl's rollout servers, on loopback.

Each rank has a replica: a Ray actor with the engine and its HTTP server, which answers exactly as the embedded backend
does. verl's adapter sits in the rank's worker and hands the trained weights over. Asleep, or between an abort and the
following resume, a server refuses calls; going to sleep waits for those under way, and an abort cuts them short, which
is counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from agl_runtime.errors import TrainerError
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.engine import Engine
from agl_runtime.trainer.backends.embedded.policy import load_policy
from agl_runtime.trainer.backends.embedded.requests import Limits
from agl_runtime.trainer.backends.embedded.server import ServerThread, create_app
from agl_runtime.trainer.backends.verl.cpu import ROLLOUT
from agl_runtime.trainer.backends.verl.cpu.door import Door
from agl_runtime.trainer.backends.verl.setup import RUN_EPOCH, SERVER_KEY

ACTOR = "agl_server_{}"
FROM_ANYWHERE = 32  # calls of verl's at once
POLL_S = 0.01

log = logging.getLogger(__name__)


class Server:
    """A Ray actor. `settings` are the replica's: model, max_tokens, max_batch, seed and context."""

    def __init__(self, policy: str, settings: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        folder = Path(policy)
        self._policy = load_policy(folder, device="cpu", context=settings["context"], computed_as=folder)
        self._epoch = int(os.environ.get(RUN_EPOCH, 0))
        server = ServerThread()
        self._engine = Engine(
            self._policy,
            PolicyVersion(self._epoch, 0),
            max_batch=settings["max_batch"],
            seeds=random.Random(settings["seed"]),
            notify=server.notify,
        )
        self._engine.start()
        limits = Limits(
            model=settings["model"],
            max_tokens=settings["max_tokens"],
            context=self._policy.context,
            vocabulary=len(self._policy.tokenizer),
        )
        codec = Codec(self._policy.tokenizer, self._policy.stop_ids)
        key = os.environ.get(SERVER_KEY) or secrets.token_urlsafe(32)
        self._door = Door(create_app(self._engine, codec, limits, key))
        self._address = server.start(self._door).removeprefix("http://")

    async def address(self) -> str:
        return self._address

    async def aborted(self) -> int:
        """Calls that were cut short so far."""
        return self._door.aborted

    async def generate(self, *_: Any, **__: Any) -> None:
        raise TrainerError("agl's rollout server answers over HTTP only.", "Leave the agent loop to agl.")

    async def load(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Serve `weights` from now on, as those of so many updates."""

        def job() -> None:
            found = self._policy.model.load_state_dict(dict(weights), strict=False)
            tied = set(getattr(self._policy.model, "_tied_weights_keys", None) or ())
            if found.unexpected_keys or set(found.missing_keys) - tied:
                raise TrainerError("The trainer's weights are not those of the model that serves.", "See model.path.")
            self._engine.replace_version(PolicyVersion(self._epoch, updates))

        await asyncio.wrap_future(self._engine.call(job))

    async def sleep(self) -> None:
        """Returns when no call is under way any more."""
        self._door.asleep = True
        while not self._door.is_empty:
            await asyncio.sleep(POLL_S)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            self._door.asleep = False

    async def abort_all_requests(self, **_: Any) -> None:
        before = self._door.aborted
        self._door.abort()
        if self._door.aborted > before:
            log.warning("%d model calls were cut short", self._door.aborted - before)

    async def resume_generation(self) -> None:
        self._door.is_paused = False

    async def clear_kv_cache(self) -> None:
        """Each generation has its own, which ends with it."""

    async def release_kv_cache(self) -> None:
        await self.sleep()

    async def resume_kv_cache(self) -> None:
        await self.wake_up()


class Replica(RolloutReplica):  # type: ignore[misc]  # verl ships no types
    server_class = Server

    async def launch_servers(self) -> None:
        """The server stands on the replica's first rank's machine, as loopback asks for."""
        settings = {**self.config.engine_kwargs[ROLLOUT], "context": self.config.max_model_len}
        actor = ray.remote(self.server_class).options(
            name=ACTOR.format(self.replica_rank), num_cpus=0, max_concurrency=FROM_ANYWHERE
        )
        server = actor.remote(self.model_config.path, settings)
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.address.remote()


class Adapter(BaseRollout):  # type: ignore[misc]  # verl ships no types
    """In the rank's worker."""

    async def resume(self, tags: list[str]) -> None:
        await self._server().wake_up.remote(tags)

    async def release(self) -> None:
        await self._server().sleep.remote()

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], wire_format: str = "", global_steps: int | None = None, **_: Any
    ) -> None:
        # A rank's shards become whole by a collective that every rank takes part in, name by name.
        whole = {name: _whole(tensor) for name, tensor in weights}
        await self._server().load.remote(whole, global_steps or 0)

    def _server(self) -> Any:
        return ray.get_actor(ACTOR.format(torch.distributed.get_rank()))


def _whole(tensor: Any) -> Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().to("cpu", torch.float32, copy=True)  # type: ignore[no-any-return]
