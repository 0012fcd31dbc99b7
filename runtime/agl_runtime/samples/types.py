"""What sample building takes and yields. Arrays are numpy, one-dimensional, never shared with the input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from agl_runtime.calls import Experts, Ids, LogProbs


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths in tokens. The prompt side of a sample is its first call's prompt; all that follows is response side."""

    max_prompt_tokens: int
    max_response_tokens: int


@dataclass(frozen=True, slots=True)
class Break:
    """Where `call` did not go on from the call `earlier`: behind the text `before`, which both have, the earlier trace
    goes on with `was`, the call's prompt with `now`. Each is a few words; all are empty without a tokenizer. `cause`:
    see `diagnose`."""

    cause: str
    call: str
    earlier: str
    before: str = ""
    was: str = ""
    now: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row of length T, with at least one trained token.

    `ids` [T]; `mask` [T] is True exactly on sampled tokens that are trained here; `logprobs` [T] holds the
    recorded log-probability of each sampled token where it is known and 0 elsewhere; `updates` [T] is the number of
    updates of the weights that sampled it, -1 elsewhere. `prompt_len` counts the leading tokens that are the first
    call's prompt. `call_ids` are the calls laid along this row, root first. `broke` says where and why the row broke
    off an earlier one, `split` the cause alone; None where nothing broke. `truncated`: the response side was cut at the
    limit. `routed` [T, layers, k] are the experts that each token was sent to where all of them are recorded; the last
    token of a row that was not cut went to none, and has zeros.
    """

    rollout_id: str
    ids: Ids
    mask: NDArray[np.bool_]
    logprobs: LogProbs
    updates: NDArray[np.int32]
    prompt_len: int
    call_ids: tuple[str, ...]
    broke: Break | None = None
    truncated: bool = False
    routed: Experts | None = None

    @property
    def split(self) -> str | None:
        return self.broke.cause if self.broke else None


@dataclass(frozen=True, slots=True)
class BuildReport:
    """Counts of one rollout or of many.

    `calls` and `sampled_tokens` cover every call, `trained_tokens` what the samples train. Each maps a named reason to
    a count: `untrained` the calls that train no token, `splits` the new rows that should have continued an earlier one,
    `dropped` the rows left out whole.
    """

    calls: int
    sampled_tokens: int
    trained_tokens: int
    splits: dict[str, int] = field(default_factory=dict)
    untrained: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def trained_share(self) -> float:
        """Trained tokens as a share of sampled tokens; 0 when nothing was sampled."""
        return self.trained_tokens / self.sampled_tokens if self.sampled_tokens else 0.0


@dataclass(frozen=True, slots=True)
class RolloutSamples:
    rollout_id: str
    samples: tuple[Sample, ...]
    report: BuildReport

    def keeping(self, kept: Sequence[Sample], lost: Mapping[str, int]) -> RolloutSamples:
        """With none but the samples `kept`; `lost` counts the others by reason."""
        trained = sum(int(np.count_nonzero(sample.mask)) for sample in kept)
        dropped = dict(+(Counter(self.report.dropped) + Counter(lost)))
        return replace(self, samples=tuple(kept), report=replace(self.report, trained_tokens=trained, dropped=dropped))


def total_report(reports: Iterable[BuildReport]) -> BuildReport:
    """The sum of many reports."""
    calls = sampled = trained = 0
    splits: Counter[str] = Counter()
    untrained: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for report in reports:
        calls += report.calls
        sampled += report.sampled_tokens
        trained += report.trained_tokens
        splits.update(report.splits)
        untrained.update(report.untrained)
        dropped.update(report.dropped)
    return BuildReport(calls, sampled, trained, dict(splits), dict(untrained), dict(dropped))
