"""The policy behind the gateway: which server and weights calls go to, and how the weights change.

The gateway forgets its model servers when it ends, and then holds every call; `announce` names the policy again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_runtime.client import GatewayClient
from agl_runtime.errors import ConfigError, TrainerError
from agl_runtime.schemas import Model, PolicyVersion
from agl_runtime.trainer.backends.base import Backend, BatchTotals, ScoredRollout, UpdateResult

DRAIN_WAIT_S = 20.0
DRAIN_PAUSE_S = 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TimedUpdate:
    """`hold_s` is how long calls were held, `update_s` the part of it that the backend took."""

    result: UpdateResult
    hold_s: float
    update_s: float


class Policy:
    """`drain_limit_s`: how long calls in flight may take to end before an update is given up."""

    def __init__(self, client: GatewayClient, backend: Backend, drain_limit_s: float) -> None:
        self._client = client
        self._backend = backend
        self._drain_limit_s = drain_limit_s
        self._model: Model | None = None
        self._changing = False

    @property
    def version(self) -> PolicyVersion:
        """Of the weights that serve."""
        return self._model.policy_version if self._model else PolicyVersion(0, 0)

    @contextlib.asynccontextmanager
    async def serving(self, run_epoch: int, resume_from: Path | None, *, is_chosen: bool) -> AsyncIterator[None]:
        """Serve within, as the gateway's only model server; afterwards calls wait for another one. Raises TrainerError,
        or ConfigError for weights that do not load and that the user chose (`is_chosen`: no checkpoint of agl's)."""
        try:
            self._model = await self._start(run_epoch, resume_from, is_chosen)
            log.info("serving version %s at %s", self.version, self._model.endpoint)
            await self._client.clear_models()
            await self._client.register_model(self._model)
            await self._client.resume()
            yield
            await self._client.clear_models()
        except (ConfigError, TrainerError):
            await self._client.clear_models()
            raise
        finally:
            await self._backend.stop()

    async def announce(self) -> None:
        """Tell a gateway that began anew. While the weights change it knows no server, and so holds all calls."""
        if self._model is not None and not self._changing:
            await self._client.register_model(self._model)

    async def update(self, rollouts: Sequence[ScoredRollout], totals: BatchTotals) -> TimedUpdate:
        """Hold, drain, update, name the new version, resume; resumes whatever happens. Raises TrainerError."""
        began = time.monotonic()
        self._changing = True
        try:
            await hold(self._client, self._drain_limit_s)
            update_began = time.monotonic()
            result = await self._backend.update(rollouts, totals)
            update_s = time.monotonic() - update_began
            self._model = self._changed(result.version)
            await self._client.register_model(self._model)
        finally:
            self._changing = False
            await self._client.resume()
        return TimedUpdate(result, time.monotonic() - began, update_s)

    async def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        await self._backend.save(folder, state)

    async def _start(self, run_epoch: int, resume_from: Path | None, is_chosen: bool) -> Model:
        try:
            return await self._backend.start(run_epoch, resume_from)
        except TrainerError as error:
            if is_chosen:  # trying again would not help
                raise ConfigError(error.what, error.fix) from error
            raise

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(ids)

    def _changed(self, version: PolicyVersion) -> Model:
        if self._model is None:
            raise TrainerError("The policy was updated before it served.", "Report this as a fault of agl.")
        return self._model.model_copy(update={"run_epoch": version.epoch, "version": version.updates})


async def hold(client: GatewayClient, drain_limit_s: float) -> None:
    """Hold new calls and wait until none is at a model server. Raises TrainerError when some do not end in time."""
    await client.pause("The policy's weights are changing.")
    give_up_at = time.monotonic() + drain_limit_s
    while (state := await client.proxy_state(drained_wait_s=DRAIN_WAIT_S)).inflight:
        if time.monotonic() > give_up_at:
            raise TrainerError(
                f"{state.inflight} model calls did not end within {drain_limit_s:.0f} s of holding new ones.",
                "See `agl logs trainer`; gateway.upstream_timeout_s limits how long a call may take.",
            )
        await asyncio.sleep(DRAIN_PAUSE_S)
