"""Intents and commits of model calls with what a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from agl_runtime.calls import VersionSpan, ids_array
from agl_runtime.schemas import Model, PolicyVersion
from agl_runtime.store.base import Commit, Intent, Store

UPSTREAM = Model(model="policy", endpoint="http://127.0.0.1:9/v1", version=2, run_epoch=1)


def intent(call_id: str, messages: Iterable[Any] = (), **changes: Any) -> Intent:
    values: dict[str, Any] = {
        "rollout_id": "r",
        "attempt_id": "0",
        "dialect": "chat",
        "model": "policy",
        "request": {"model": "policy", "messages": list(messages)},
    }
    return Intent(call_id=call_id, **{**values, **changes})


def commit(call_id: str, prompt: Iterable[int] = (1, 2), sampled: Iterable[int] = (3,), **changes: Any) -> Commit:
    sampled_ids = ids_array(sampled)
    values: dict[str, Any] = {
        "response": {"id": call_id, "choices": []},
        "logprobs": np.linspace(-2, -0.5, sampled_ids.size, dtype=np.float32),
        "spans": (VersionSpan(0, sampled_ids.size, PolicyVersion(1, 2)),),
        "trainable": True,
        "reason": None,
        "finish_reason": "stop",
        "http_status": 200,
        "upstream": UPSTREAM,
        "latency_ms": 12.5,
    }
    return Commit(call_id=call_id, prompt_ids=ids_array(prompt), sampled_ids=sampled_ids, **{**values, **changes})


async def record(
    store: Store, call_id: str, prompt: Iterable[int] = (1, 2), sampled: Iterable[int] = (3,), **changes: Any
) -> None:
    """Begin, commit and deliver a call; `changes` are those of its intent."""
    await store.begin_call(intent(call_id, **changes))
    await store.commit_call(commit(call_id, prompt, sampled))
    await store.mark_delivered(call_id)


class Clock:
    """Seconds since the epoch that pass only when a test says so."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
