"""A model server that agl does not run, in the shape of a backend: it can be recorded from, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_runtime.errors import TrainerError
from agl_runtime.schemas import Model
from agl_runtime.trainer.backends.base import BatchTotals, ScoredRollout, UpdateResult


@dataclass(frozen=True, slots=True)
class ExternalServer:
    """`endpoint` is its OpenAI base URL, `name` what it calls the model. Whatever needs its weights raises
    TrainerError."""

    name: str
    endpoint: str

    async def start(self, run_epoch: int, resume_from: Path | None) -> Model:
        return Model(model=self.name, endpoint=self.endpoint, run_epoch=run_epoch)

    async def update(self, rollouts: Sequence[ScoredRollout], totals: BatchTotals) -> UpdateResult:
        raise self._not_ours()

    async def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        raise self._not_ours()

    def decode(self, ids: Sequence[int]) -> str:
        raise self._not_ours()

    async def stop(self) -> None:
        """It goes on without us."""

    def _not_ours(self) -> TrainerError:
        return TrainerError(f"The weights behind {self.endpoint} are not agl's to change.", "Set model.path instead.")
