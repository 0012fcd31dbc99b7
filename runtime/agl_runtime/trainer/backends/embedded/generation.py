"""One sequence to sample, and what has been sampled of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from agl_runtime.calls import VersionSpan
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.embedded.sampling import SamplingParams, Token

Finish = Literal["stop", "length", "error"]


class Signal(Protocol):
    """An event of threading or asyncio."""

    def set(self) -> None: ...


@dataclass(eq=False, slots=True)
class Generation:
    """The engine's thread writes `tokens` and `finish`; any thread may read them, and may set `cancelled`.

    `prompt` is not empty and leaves room for `params.max_tokens` in the policy's context. `is_last` is told every
    sampled id and says whether the answer ends with it (a stop string); it runs on the engine's thread. `changed` is
    set when the generation has finished and, if `live`, after each token.
    """

    prompt: Sequence[int]
    params: SamplingParams
    changed: Signal
    seed: str | None = None
    live: bool = False
    is_last: Callable[[int], bool] | None = None
    cancelled: bool = False
    tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    _starts: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    _random: random.Random | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def spans(self) -> list[VersionSpan]:
        """Which version sampled which of `tokens`."""
        ends = [start for start, _ in self._starts[1:]] + [len(self.tokens)]
        return [VersionSpan(start, end, version) for (start, version), end in zip(self._starts, ends, strict=True)]

    def accept(self, token: Token, version: PolicyVersion) -> None:
        """Append what the weights named `version` gave."""
        if not self._starts or self._starts[-1][1] != version:
            self._starts.append((len(self.tokens), version))
        self.tokens.append(token)

    def uniform(self, seeds: random.Random) -> float:
        """The next number of its own random stream, begun from its seed or else from `seeds`."""
        if self._random is None:
            self._random = random.Random(self.seed if self.seed is not None else seeds.getrandbits(64))
        return self._random.random()
