"""A group that has ended, as an event: all that metrics tell of it, without its tokens (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agl_runtime.samples.types import BuildReport, RolloutSamples, total_report
from agl_runtime.trainer.backends.base import BatchTotals
from agl_runtime.trainer.rollouts import Ended
from agl_runtime.trainer.scoring import Scores


@dataclass(frozen=True, slots=True)
class Told:
    """A rollout as its group's event tells it; see `rollouts.Ended`."""

    rollout_id: str
    reward: float | None
    error: str | None
    agent_error: str | None
    cpu_s: float | None
    rss_mb: float | None
    call_count: int
    sampled_tokens: int
    samples: int
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class GroupRecord:
    uid: str
    number: int
    version: str
    rollouts: tuple[Told, ...]
    report: BuildReport

    @classmethod
    def of(
        cls, uid: str, number: int, version: str, ended: Sequence[Ended], built: Sequence[RolloutSamples]
    ) -> GroupRecord:
        rollouts = tuple(
            Told(
                item.rollout_id,
                item.reward,
                item.error,
                item.agent_error,
                item.cpu_s,
                item.rss_mb,
                item.call_count,
                item.sampled_tokens,
                len(samples.samples),
                samples.report.trained_tokens,
            )
            for item, samples in zip(ended, built, strict=True)
        )
        return cls(uid, number, version, rollouts, total_report(samples.report for samples in built))

    @classmethod
    def parse(cls, event: Mapping[str, Any]) -> GroupRecord:
        rollouts = tuple(Told(**item) for item in event["rollouts"])
        return cls(event["uid"], event["number"], event["version"], rollouts, BuildReport(**event["report"]))

    def event(self) -> dict[str, Any]:
        return asdict(self)

    def teaches(self, *, flat_trains: bool) -> bool:
        """Whether there is something to learn; verl fails over a batch without any token to train."""
        return (flat_trains or self.has_spread) and any(item.trained_tokens for item in self.rollouts)

    @property
    def has_spread(self) -> bool:
        """Whether its rewards differ."""
        rewards = [item.reward for item in self.rollouts if item.reward is not None]
        return bool(rewards) and min(rewards) != max(rewards)


def scores_of(groups: Iterable[GroupRecord], skipped: str | None = None) -> Scores:
    """What `scoring.score` says of the same groups, but for what is to be computed."""
    groups = list(groups)
    scored = [item for group in groups for item in group.rollouts if item.reward is not None]
    return Scores(
        rollouts=(),
        totals=BatchTotals(
            len(scored), sum(item.samples for item in scored), sum(item.trained_tokens for item in scored)
        ),
        groups=len(groups),
        groups_without_spread=sum(not group.has_spread for group in groups),
        report=total_report(group.report for group in groups),
        skipped=skipped,
    )
