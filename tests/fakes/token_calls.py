"""Recorded calls for tests, written as plain lists of token ids. All arrays are read-only, so that writing fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agl_runtime.calls import Call, CallInfo, RolloutCalls, VersionSpan
from agl_runtime.schemas import PolicyVersion


def call(
    call_id: str,
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    logprobs: Sequence[float] | None = None,
    spans: tuple[VersionSpan, ...] | None = None,
    **info: Any,
) -> Call:
    """A trainable, delivered call of the main kind unless `info` says otherwise; log-probabilities tell the id and
    the place of their token apart."""
    known = {"committed": True, "delivered": True, "trainable": True, "dialect": "chat", "seq": -1, **info}
    if logprobs is None:
        logprobs = [-(token + 1 + place / 100) for place, token in enumerate(sampled)]
    if spans is None:
        spans = (VersionSpan(0, len(sampled), PolicyVersion(1, 3)),)
    return Call(
        CallInfo(call_id=call_id, rollout_id="r", attempt_id="0", **known),
        _read_only(prompt, np.int32),
        _read_only(sampled, np.int32),
        _read_only(logprobs, np.float32),
        spans,
    )


def untrainable(call_id: str, prompt: Sequence[int], sampled: Sequence[int], reason: str, **info: Any) -> Call:
    return call(call_id, prompt, sampled, trainable=False, reason=reason, **info)


def rollout(*calls: Call) -> RolloutCalls:
    """Calls in the order of their commit, which is also that of their start unless they have a `seq` already."""
    numbered = [
        replace(c, info=replace(c.info, commit_seq=place, seq=c.info.seq if c.info.seq >= 0 else place))
        for place, c in enumerate(calls)
    ]
    return RolloutCalls("r", "0", tuple(numbered), 1.0)


def _read_only(values: Any, dtype: Any) -> Any:
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array
