from __future__ import annotations

from agl_runtime.gateway.metrics import Metrics, render
from agl_runtime.schemas import ProxyState


def test_every_line_is_a_sample_or_a_comment_of_its_family() -> None:
    metrics = Metrics(call_s=1.5, calls=3, prompt_tokens=10, sampled_tokens=4)
    metrics.refused[409] += 1
    metrics.refused[409] += 1
    state = ProxyState(paused=True, retry_after_seconds=5, reason=None, inflight=2, held=1)
    text = render(metrics, state, 12.5, {"rollouts.running": 4, "calls.undelivered": 1, "other": 9})
    assert text.endswith("\n")
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples == {
        'agl_rollouts{state="running"}': "4",
        'agl_calls{reason="undelivered"}': "1",
        "agl_inflight": "2",
        "agl_held": "1",
        "agl_paused": "1",
        "agl_hold_seconds_total": "12.5",
        "agl_upstream_failures_total": "0",
        "agl_replayed_total": "0",
        "agl_pending_bytes": "0",
        "agl_shed_total": "0",
        "agl_call_seconds_sum": "1.5",
        "agl_call_seconds_count": "3",
        'agl_tokens_total{kind="prompt"}': "10",
        'agl_tokens_total{kind="sampled"}': "4",
        'agl_refused_total{status="409"}': "2",
    }
