"""The embedded backend: serving and training in one process, on one weights object.

Three threads: the trainer's event loop calls this class; the model server answers HTTP; the engine's thread runs the
model. An update runs there between two decoding steps, so switching is a pause, not a copy, and the version changes
exactly where the weights do. Generations in flight at an update (the trainer drains them first) go on under the new
weights, as their version spans say.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import SecretStr

from agl_runtime.config import Config
from agl_runtime.errors import TrainerError
from agl_runtime.schemas import Model, PolicyVersion
from agl_runtime.trainer.backends.base import BatchTotals, ScoredRollout, UpdateResult
from agl_runtime.trainer.backends.embedded.checkpoint import read_updates, restore, save_checkpoint
from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.engine import Engine
from agl_runtime.trainer.backends.embedded.policy import Policy, load_policy
from agl_runtime.trainer.backends.embedded.requests import Limits
from agl_runtime.trainer.backends.embedded.server import ServerThread, create_app
from agl_runtime.trainer.backends.embedded.update import Updated, Updater


@dataclass(frozen=True)
class _Running:
    policy: Policy
    codec: Codec
    engine: Engine
    updater: Updater
    server: ServerThread


class EmbeddedBackend:
    """`policy` is the Hugging Face folder of the weights to start from, and the reference of a KL penalty."""

    def __init__(self, config: Config, policy: Path) -> None:
        self._config = config
        self._base = policy
        self._now: _Running | None = None

    async def start(self, run_epoch: int, resume_from: Path | None) -> Model:
        """See `Backend.start`. Raises TrainerError for a folder or checkpoint that does not load."""
        version = PolicyVersion(run_epoch, read_updates(resume_from) if resume_from else 0)
        running = await asyncio.to_thread(self._load, version, resume_from)
        self._now = running
        running.engine.start()
        limits = Limits(
            model=self._config.model.name,
            max_tokens=self._config.model.max_tokens,
            context=running.policy.context,
            vocabulary=len(running.policy.tokenizer),
        )
        key = secrets.token_urlsafe(32)
        url = running.server.start(create_app(running.engine, running.codec, limits, key))
        return Model(
            model=limits.model,
            endpoint=f"{url}/v1",
            version=version.updates,
            run_epoch=version.epoch,
            api_key=SecretStr(key),
        )

    def _load(self, version: PolicyVersion, resume_from: Path | None) -> _Running:
        train = self._config.train
        torch.set_num_threads(train.threads)
        torch.manual_seed(train.seed)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        policy = self._policy(resume_from or self._base)
        reference = self._policy(self._base) if train.kl_coef else None
        updater = Updater(policy, train, reference)
        seeds = random.Random(train.seed)
        if resume_from:
            restore(resume_from, updater.optimizer, seeds)
        server = ServerThread()
        engine = Engine(policy, version, max_batch=train.max_batch, seeds=seeds, notify=server.notify)
        return _Running(policy, Codec(policy.tokenizer, policy.stop_ids), engine, updater, server)

    def _policy(self, folder: Path) -> Policy:
        return load_policy(
            folder, device=self._config.train.device, context=self._config.model.context, computed_as=self._base
        )

    async def update(self, rollouts: Sequence[ScoredRollout], totals: BatchTotals) -> UpdateResult:
        """See `Backend.update`. A batch without a gradient leaves weights and version as they are."""
        now = self._running()

        def job() -> UpdateResult:
            began = time.monotonic()
            version = now.engine.version
            result: Updated | None = None
            try:
                result = now.updater.run(rollouts, totals, version.updates)
            finally:
                # An update that failed may have taken some steps: the old name must not stay on these weights.
                if result is None or result.steps:
                    now.engine.replace_version(version._replace(updates=version.updates + 1))
            return UpdateResult(now.engine.version, {**result.metrics, "seconds": time.monotonic() - began})

        return await asyncio.wrap_future(now.engine.call(job))

    async def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """See `Backend.save`. Raises TrainerError."""
        now = self._running()

        def job() -> None:
            save_checkpoint(folder, now.policy, now.updater.optimizer, now.engine.seeds, state)

        await asyncio.wrap_future(now.engine.call(job))

    def decode(self, ids: Sequence[int]) -> str:
        return self._running().codec.decode(ids)

    async def stop(self) -> None:
        if self._now is None:
            return
        now, self._now = self._now, None
        await asyncio.to_thread(now.engine.close)
        await asyncio.to_thread(now.server.stop)
        await asyncio.to_thread(now.engine.stop)
        now.server.close()

    def _running(self) -> _Running:
        if self._now is None:
            raise TrainerError("The embedded backend does not run.", "Start it first.")
        return self._now
