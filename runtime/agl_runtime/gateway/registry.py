"""Which model servers there are, and to which of them a rollout's calls go.

Every rollout is pinned to one endpoint of a model by a hash, so that its prefix stays in that server's cache; when an
endpoint fails, its rollouts (and no others) move to their next choice until it has had time to recover.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence

from agl_runtime.schemas import Model

RECOVERY_S = 15.0


class Registry:
    """`policy` is the name of the model that is trained. Names and endpoints keep the order of their registration."""

    def __init__(self, policy: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._configured = policy
        self._clock = clock
        self._models: dict[str, dict[str, Model]] = {}
        self._failed_at: dict[str, float] = {}

    @property
    def policy(self) -> str:
        """The configured name where it is registered, else the first that is."""
        return next(iter(self._models), self._configured) if self._configured not in self._models else self._configured

    def register(self, models: Sequence[Model]) -> None:
        """Add, or replace by (model, endpoint)."""
        for model in models:
            self._models.setdefault(model.model, {})[model.endpoint] = model
            self._failed_at.pop(model.endpoint, None)

    def clear(self) -> None:
        self._models.clear()
        self._failed_at.clear()

    def models(self) -> list[Model]:
        return [model for servers in self._models.values() for model in servers.values()]

    def names(self) -> list[str]:
        return list(dict.fromkeys([self.policy, *self._models]))

    def resolve(self, asked: str) -> str:
        """The registered model that serves a call which asks for `asked`: any unknown name means the policy."""
        return asked if asked in self._models else self.policy

    def route(self, name: str, rollout_id: str) -> Model | None:
        """The server for this rollout's calls of the model `name`; None when none is registered."""
        servers = self._models.get(name, {}).values()
        return min(servers, key=lambda model: (self._is_failing(model), _rank(model, rollout_id)), default=None)

    def current(self, model: Model) -> Model | None:
        """What is registered now for the model and endpoint of `model`."""
        return self._models.get(model.model, {}).get(model.endpoint)

    def report_failure(self, model: Model) -> None:
        self._failed_at[model.endpoint] = self._clock()

    def _is_failing(self, model: Model) -> bool:
        failed_at = self._failed_at.get(model.endpoint)
        return failed_at is not None and self._clock() - failed_at < RECOVERY_S


def _rank(model: Model, rollout_id: str) -> bytes:
    return hashlib.blake2b(f"{rollout_id}\0{model.endpoint}".encode(), digest_size=8).digest()
