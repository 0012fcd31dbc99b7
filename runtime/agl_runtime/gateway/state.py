"""Everything that one gateway holds while it runs; `create_app` builds it, and nothing of it lives in a module."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import uuid4

from agl_runtime.config import Config
from agl_runtime.errors import ConfigError
from agl_runtime.gateway.attempts import Attempts
from agl_runtime.gateway.changes import Changes, Signal
from agl_runtime.gateway.dialects import Dialect, all_dialects
from agl_runtime.gateway.hold import Hold
from agl_runtime.gateway.load import Load
from agl_runtime.gateway.metrics import Metrics
from agl_runtime.gateway.recorder import Recorder
from agl_runtime.gateway.registry import Registry
from agl_runtime.gateway.service import CallService
from agl_runtime.gateway.upstream import Upstream
from agl_runtime.schemas import Model, PartStatus, Rollout
from agl_runtime.store.base import Store


@dataclass
class Gateway:
    """`parts` holds the last status of each part. Models, parts and holding are forgotten when it ends; `name` is that
    of this start."""

    config: Config
    store: Store
    admin_key: str = field(repr=False)
    hold: Hold
    registry: Registry
    upstream: Upstream
    attempts: Attempts
    calls: CallService
    metrics: Metrics
    load: Load
    dialects: dict[str, Dialect] = field(default_factory=all_dialects)
    changes: Changes = field(default_factory=Changes)
    rollouts_moved: Signal = field(default_factory=Signal)
    parts: dict[str, PartStatus] = field(default_factory=dict)
    is_stopping: bool = False
    name: str = field(default_factory=lambda: uuid4().hex)

    def start(self) -> None:
        if endpoint := self.config.model.endpoint:
            self.set_models([Model(model=self.config.model.name, endpoint=endpoint)])

    def stop(self) -> None:
        """Let go of everything that waits, so that the server can stop."""
        self.is_stopping = True
        self.calls.is_stopping = True
        self.hold.close()
        self.changes.moved.fire()
        self.rollouts_moved.fire()

    async def close(self) -> None:
        for call in self.attempts.all_running():
            call.abandon()
        self.upstream.close()

    async def counts(self) -> dict[str, int]:
        """The store's, with `calls.running` apart from `calls.incomplete`: those that broke off."""
        found = await self.store.counts()
        running = sum(call.started_at > 0 for call in self.attempts.all_running())
        running = min(running, found["calls.incomplete"])  # some of them may be on record by now
        return {**found, "calls.running": running, "calls.incomplete": found["calls.incomplete"] - running}

    def set_models(self, models: list[Model] | None) -> None:
        """Register models, or clear all with None."""
        if models is None:
            self.registry.clear()
        else:
            self.registry.register(models)
        known = self.registry.models()
        self.hold.set_has_model(bool(known))
        self.changes.emit("models", {"models": [model.model_dump() for model in known]})

    def rollout_changed(self, rollout: Rollout) -> None:
        """Wake who waits for it and tell the change stream, without its input."""
        self.rollouts_moved.fire()
        self.changes.emit("rollout", rollout.model_dump(mode="json", exclude={"input", "config"}))

    def proxy_changed(self) -> None:
        self.changes.emit("proxy", self.hold.state().model_dump())


def build(config: Config, store: Store, admin_key: str) -> Gateway:
    """Raises ConfigError without an admin key: nothing is served to everyone."""
    if not admin_key:
        raise ConfigError("The gateway has no admin key.", "Delete the empty file `key` in .agl and start it again.")
    gateway, model = config.gateway, config.model
    registry, hold, metrics = Registry(model.name, gateway.models), Hold(gateway.hold_limit_s), Metrics()
    attempts = Attempts(store, registry)
    keys = {model.endpoint: model.api_key.get_secret_value()} if model.endpoint and model.api_key else {}
    upstream = Upstream(registry, hold, gateway.upstream_retries, gateway.upstream_timeout_s, keys)
    load = Load(gateway.max_pending_mb * 2**20, metrics)
    recorder = Recorder(store, registry, metrics)
    calls = CallService(store, config, hold, registry, upstream, attempts, metrics, recorder)
    return Gateway(config, store, admin_key, hold, registry, upstream, attempts, calls, metrics, load)
