"""Makes what the trainer meets (calls, samples, ended rollouts) without a gateway."""

from __future__ import annotations

import numpy as np

from agl_runtime.calls import Call, CallInfo, RolloutCalls, VersionSpan, ids_array
from agl_runtime.samples.types import BuildReport, RolloutSamples, Sample
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.rollouts import Ended


def make_call(
    rollout_id: str, call_id: str = "c0", sampled: int = 3, updates: int = 0, reason: str | None = None
) -> Call:
    """A committed and delivered call that sampled `sampled` tokens; not trainable where a reason is given."""
    info = CallInfo(
        call_id,
        rollout_id,
        "0",
        0,
        "chat",
        committed=True,
        commit_seq=0,
        delivered=True,
        trainable=reason is None,
        reason=reason,
        model="policy",
        finish_reason="stop",
        http_status=200,
    )
    span = VersionSpan(0, sampled, PolicyVersion(1, updates))
    return Call(info, ids_array([1, 2]), ids_array(range(3, 3 + sampled)), np.full(sampled, -0.5, np.float32), (span,))


def make_calls(rollout_id: str, reward: float | None, *calls: Call) -> RolloutCalls:
    return RolloutCalls(rollout_id, "0", calls, reward)


def make_ended(
    rollout_id: str = "r",
    reward: float | None = 0.0,
    calls: int = 1,
    error: str | None = None,
    cpu_s: float | None = None,
    agent_error: str | None = None,
) -> Ended:
    made = [make_call(rollout_id, f"c{n}") for n in range(calls)]
    why = error or ("ended without a reward" if reward is None else None)
    made_calls = make_calls(rollout_id, reward, *made)
    return Ended(rollout_id, reward, made_calls, why, agent_error, cpu_s, 50.0 if cpu_s else None)


def make_samples(
    rollout_id: str = "r", samples: int = 1, tokens: int = 3, untrained: str | None = None
) -> RolloutSamples:
    """`samples` rows that each train `tokens` tokens after a prompt of two."""
    row = Sample(
        rollout_id,
        ids_array(range(2 + tokens)),
        np.array([False, False] + [True] * tokens),
        np.full(2 + tokens, -0.5, np.float32),
        np.array([-1, -1] + [0] * tokens, np.int32),
        2,
        ("c0",),
    )
    trained = samples * tokens
    report = BuildReport(1, tokens if untrained else trained, trained, {}, {untrained: 1} if untrained else {}, {})
    return RolloutSamples(rollout_id, (row,) * samples, report)
