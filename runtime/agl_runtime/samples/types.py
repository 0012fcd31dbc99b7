"""What sample building takes and yields. Arrays are numpy, one-dimensional, never shared with the input."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agl_runtime.calls import Ids, LogProbs


@dataclass(frozen=True, slots=True)
class Limits:
    """Lengths in tokens. The prompt side of a sample is its first call's prompt; all that follows is response side."""

    max_prompt_tokens: int
    max_response_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One training row of length T.

    `ids` [T]; `mask` [T] is True exactly on sampled tokens that are trained here; `logprobs` [T] holds the
    recorded log-probability of each token that was sampled and 0 elsewhere; `updates` [T] is the number of updates of
    the weights that sampled it, -1 elsewhere. `prompt_len` counts the leading tokens that are the first call's prompt. `call_ids`
    are the calls laid along this row, root first. `split` says why the row did not continue an earlier one.
    """

    rollout_id: str
    ids: Ids
    mask: NDArray[np.bool_]
    logprobs: LogProbs
    updates: NDArray[np.int32]
    prompt_len: int
    call_ids: tuple[str, ...]
    split: str | None = None
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class BuildReport:
    """Counts of one rollout. `splits`, `untrained` and `dropped` map a named reason to a count."""

    calls: int
    sampled_tokens: int
    trained_tokens: int
    splits: dict[str, int] = field(default_factory=dict)
    untrained: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolloutSamples:
    rollout_id: str
    samples: tuple[Sample, ...]
    report: BuildReport
