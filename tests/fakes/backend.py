"""A backend whose weights are the list of what they were trained on, so that a test can read their whole lineage.

It serves nothing itself: `endpoint` is whatever model server the test runs, or none. Checkpoints are real folders.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agl_runtime.schemas import Model, PolicyVersion
from agl_runtime.trainer.backends.base import BatchTotals, ScoredRollout, UpdateResult

WEIGHTS_FILE = "weights.json"


class FakeBackend:
    """`weights` has one list of rollout ids an update, `sampled_by` the numbers of updates of the weights that sampled
    what it trained. `before` is called with the name of each method as it begins,
    and may raise."""

    def __init__(
        self, endpoint: str = "http://127.0.0.1:9/v1", before: Callable[[str], None] = lambda name: None
    ) -> None:
        self.endpoint = endpoint
        self.weights: list[list[str]] = []
        self.totals: list[BatchTotals] = []
        self.sampled_by: list[set[int]] = []
        self.version = PolicyVersion(0, 0)
        self.is_stopped = False
        self._before = before

    async def start(self, run_epoch: int, resume_from: Path | None) -> Model:
        self._before("start")
        if resume_from:
            self.weights = json.loads((resume_from / WEIGHTS_FILE).read_text())
            assert json.loads((resume_from / "state.json").read_text())["updates"] == len(self.weights)
        self.version = PolicyVersion(run_epoch, len(self.weights))
        return Model(model="policy", endpoint=self.endpoint, run_epoch=run_epoch, version=self.version.updates)

    async def update(self, rollouts: Sequence[ScoredRollout], totals: BatchTotals) -> UpdateResult:
        self._before("update")
        self.weights.append([item.samples.rollout_id for item in rollouts])
        self.totals.append(totals)
        rows = [row for item in rollouts for row in item.samples.samples]
        self.sampled_by.append({int(number) for row in rows for number in row.updates[row.mask]})
        self.version = self.version._replace(updates=len(self.weights))
        self._before("updated")
        return UpdateResult(self.version, {"loss": 0.5, "grad_norm": 1.0, "logprob_gap": 1e-6})

    async def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        self._before("save")
        assert not folder.exists()
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, content in ((WEIGHTS_FILE, self.weights), ("config.json", {}), ("state.json", dict(state))):
            (partial / name).write_text(json.dumps(content))
        self._before("saving")
        partial.rename(folder)
        self._before("saved")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(number) for number in ids)

    async def stop(self) -> None:
        self.is_stopped = True
