"""What verl's processes tell, turned into agl's metrics and the trainer's status."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from agl_runtime.client import GatewayClient
from agl_runtime.schemas import Model
from agl_runtime.trainer.backends.verl.records import GroupRecord, Told, scores_of
from agl_runtime.trainer.backends.verl.setup import SERVER_KEY, Lines, Setup
from agl_runtime.trainer.metrics import Age, Line, MetricsLog, Times, step_line, tokens_per_s
from agl_runtime.trainer.progress import Progress
from agl_runtime.trainer.schedule import Phase

FIGURES = {
    "loss": "actor/pg_loss",
    "grad_norm": "actor/grad_norm",
    "kl": "actor/ppo_kl",
    "clip_fraction": "actor/pg_clipfrac",
    "tis_weight": "rollout_corr/rollout_is_mean",
    "tis_capped": "rollout_corr/rollout_is_ratio_fraction_high",
}
"""agl's names for what verl measures; what verl does not give is 0."""

log = logging.getLogger(__name__)


class Follower:
    """`catch_up` reads on; `unlearnt` are the rollouts of the batches that could teach nothing, before any update;
    `begun` says that verl's own loop goes."""

    def __init__(self, setup: Setup, metrics: MetricsLog, progress: Progress, figures: Path) -> None:
        self._setup = setup
        self._metrics = metrics
        self._progress = progress
        self._events = setup.events()
        self._figures = Lines(figures)
        self._batch = setup.project.config.train.groups_per_step
        self._groups: dict[str, GroupRecord] = {}
        self._batches: dict[int, tuple[Mapping[str, Any], list[GroupRecord]]] = {}
        self._models: list[Model] = []
        self._ready = 0
        self.unlearnt: list[Told] = []
        self.saved = setup.step
        self.begun = False

    def catch_up(self) -> None:
        for event in self._events.fresh():
            if event["kind"] == "group":
                self._groups[event["uid"]] = GroupRecord.parse(event)
            if event["epoch"] == self._setup.run_epoch:
                self.begun = True
                self._on(event)
        for line in self._figures.fresh():
            if (step := line["step"]) in self._batches:
                self._metrics.append(self._line(*self._batches.pop(step), line["data"]))

    async def announce(self, client: GatewayClient) -> None:
        """Tell a gateway that began anew; while weights change there is nothing to tell."""
        for model in self._models:
            await client.register_model(model)

    def _on(self, event: Mapping[str, Any]) -> None:
        match event["kind"]:
            case "serving":
                key = os.environ.get(SERVER_KEY)
                self._models = [Model(**model, api_key=SecretStr(key) if key else None) for model in event["models"]]
                self._progress.detail["version"] = str(self._setup.weights(event["step"]))
            case "dispatched":
                self._progress.sampling(self._ready, self._batch)
            case "group":
                self._ready += 1
                self._progress.sampled(sum(item["sampled_tokens"] for item in event["rollouts"]))
                if self._progress.phase == Phase.SAMPLING:
                    self._progress.sampling(min(self._ready, self._batch), self._batch)
            case "batch":
                self._batches[event["step"]] = event, self._take(event["uids"])
            case "dropped":
                self._take(event["uids"])
            case "skipped":
                groups = self._take(event["uids"])
                self.unlearnt += [item for group in groups for item in group.rollouts]
                log.warning(
                    "%d groups are replaced: their rewards do not differ or are missing, or there is no token to train",
                    len(groups),
                )
            case "held":
                self._models = []
                self._progress.enter(Phase.UPDATING)
            case "validating":
                self._progress.enter(Phase.VALIDATING, event["rollouts"], "rollouts")
            case "validation" if event["line"]:
                self._metrics.append(event["line"])
            case "validation":
                log.warning("the validation at step %d says nothing: no rollout got a reward", event["step"])
            case "saved":
                self.saved = event["step"]

    def _take(self, uids: Sequence[str]) -> list[GroupRecord]:
        """Groups that are waited for no more; those that had not ended are not among them."""
        groups = [self._groups.pop(uid) for uid in uids if uid in self._groups]
        self._ready = max(0, self._ready - len(groups))
        return groups

    def _line(self, batch: Mapping[str, Any], groups: Sequence[GroupRecord], data: Mapping[str, Any]) -> Line:
        sample_s, step_s = data.get("timing_s/gen", 0.0), data.get("timing_s/step", 0.0)
        save_s = data.get("timing_s/save_checkpoint", 0.0)
        times = Times(sample_s, step_s - sample_s, step_s - sample_s - save_s, save_s)
        figures = {name: float(data[theirs]) for name, theirs in FIGURES.items() if theirs in data}
        figures |= _derived(data, groups, is_fresh=not any(batch["staleness"]))
        line = batch_line(self._setup, batch, groups, figures, times)
        self._progress.detail |= {
            "step": line["step"],
            "reward": line["reward_mean"],
            "tokens_per_s": tokens_per_s(line),
        }
        return line


def batch_line(
    setup: Setup,
    batch: Mapping[str, Any],
    groups: Sequence[GroupRecord],
    figures: Mapping[str, float],
    times: Times,
) -> Line:
    """Of the step whose batch this event tells."""
    rollouts = [item for group in groups for item in group.rollouts]
    age = Age(tuple(batch["staleness"]), batch["dropped"])
    return step_line(batch["step"], setup.weights(batch["step"]), rollouts, scores_of(groups), figures, times, age)


def _derived(data: Mapping[str, Any], groups: Sequence[GroupRecord], *, is_fresh: bool) -> dict[str, float]:
    """verl adds entropy up over tokens, as it does losses here. The extremes of the importance ratio of tokens that the
    weights before the update sampled tell the largest gap of log-probabilities."""
    tokens = sum(item.trained_tokens for group in groups if group.has_spread for item in group.rollouts)
    ratios = [data.get(f"rollout_corr/rollout_is_{end}", 1.0) for end in ("max", "min")]
    gaps = [abs(math.log(ratio)) for ratio in ratios if ratio > 0]
    return {
        "entropy": data.get("actor/entropy", 0.0) / tokens if tokens else 0.0,
        **({"logprob_gap": max(gaps)} if gaps and is_fresh else {}),
    }
