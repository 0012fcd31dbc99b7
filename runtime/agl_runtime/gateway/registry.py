"""Which model servers there are, what names mean, and to which server a rollout's calls go.

Every rollout is pinned to one endpoint of a model by a hash, so that its prefix stays in that server's cache; when an
endpoint fails, its rollouts (and no others) move to their next choice, spread over the others, until it has had time to
recover: longer each time that it fails on their return.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from agl_runtime.schemas import Model

RECOVERY_S = 15.0
LONGEST_RECOVERY_S = 240.0


class Registry:
    """`policy` is the name of the model that is trained, `meanings` what patterns of names mean. Names and endpoints
    keep the order of their registration."""

    def __init__(
        self, policy: str, meanings: Mapping[str, str] | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._configured = policy
        self._meanings = meanings or {}
        self._clock = clock
        self._models: dict[str, dict[str, Model]] = {}
        self._failing: dict[str, tuple[float, float]] = {}  # until when, and how long that is

    @property
    def policy(self) -> str:
        """The configured name where it is registered, else the first that is."""
        return next(iter(self._models), self._configured) if self._configured not in self._models else self._configured

    def register(self, models: Sequence[Model]) -> None:
        """Add, or replace by (model, endpoint)."""
        for model in models:
            self._models.setdefault(model.model, {})[model.endpoint] = model
            self._failing.pop(model.endpoint, None)

    def clear(self) -> None:
        self._models.clear()
        self._failing.clear()

    def models(self) -> list[Model]:
        return [model for servers in self._models.values() for model in servers.values()]

    def names(self) -> list[str]:
        return list(dict.fromkeys([self.policy, *self._models]))

    def meant(self, asked: str) -> str:
        """The model that a call wants: what the first pattern that fits says, else what it asks for. No name at all,
        and the configured one, mean the policy."""
        fitting = (name for pattern, name in self._meanings.items() if fnmatchcase(asked, pattern))
        name = next(fitting, asked)
        return self.policy if name in ("", self._configured) else name

    def resolve(self, asked: str) -> str:
        """The registered model that serves a call which asks for `asked`: the policy where none has the name meant."""
        meant = self.meant(asked)
        return meant if meant in self._models else self.policy

    def route(self, name: str, rollout_id: str) -> Model | None:
        """The server for this rollout's calls of the model `name`; None when none is registered."""
        servers = self._models.get(name, {}).values()
        return min(servers, key=lambda model: (self._is_failing(model), _rank(model, rollout_id)), default=None)

    def current(self, model: Model) -> Model | None:
        """What is registered now for the model and endpoint of `model`."""
        return self._models.get(model.model, {}).get(model.endpoint)

    def report_failure(self, model: Model) -> None:
        if self._is_failing(model):
            return  # of a call that had gone there before
        until, waited_s = self._failing.get(model.endpoint, (0.0, 0.0))
        is_relapse = self._clock() < until + waited_s
        wait_s = min(2 * waited_s, LONGEST_RECOVERY_S) if is_relapse else RECOVERY_S
        self._failing[model.endpoint] = (self._clock() + wait_s, wait_s)

    def _is_failing(self, model: Model) -> bool:
        return self._clock() < self._failing.get(model.endpoint, (0.0, 0.0))[0]


def _rank(model: Model, rollout_id: str) -> bytes:
    return hashlib.blake2b(f"{rollout_id}\0{model.endpoint}".encode(), digest_size=8).digest()
