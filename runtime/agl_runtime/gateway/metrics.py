"""What the gateway counts while it runs, and the Prometheus text of it and of the store's own counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agl_runtime.schemas import ProxyState


@dataclass(slots=True)
class Metrics:
    """Since this gateway started, but for `pending_bytes`, which is of now; times in seconds."""

    call_s: float = 0.0
    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    upstream_failures: int = 0
    replayed: int = 0
    pending_bytes: int = 0
    shed: int = 0


def render(metrics: Metrics, proxy: ProxyState, held_total_s: float, counts: Mapping[str, int]) -> str:
    """The text exposition format. `counts` are the store's: "rollouts.running", "calls.trainable", ..."""
    lines = [
        *_family("agl_rollouts", "gauge", "Rollouts in the store by state.", _split(counts, "rollouts", "state")),
        *_family("agl_calls", "gauge", "Model calls in the store by reason.", _split(counts, "calls", "reason")),
        *_family("agl_inflight", "gauge", "Calls at a model server.", [("", proxy.inflight)]),
        *_family("agl_held", "gauge", "Calls held now.", [("", proxy.held)]),
        *_family("agl_paused", "gauge", "Whether new calls are held.", [("", int(proxy.paused))]),
        *_family("agl_hold_seconds_total", "counter", "Time in which calls were held.", [("", held_total_s)]),
        *_family("agl_upstream_failures_total", "counter", "Calls lost to it.", [("", metrics.upstream_failures)]),
        *_family("agl_replayed_total", "counter", "Retries answered from the record.", [("", metrics.replayed)]),
        *_family("agl_pending_bytes", "gauge", "Requests held or served now.", [("", metrics.pending_bytes)]),
        *_family("agl_shed_total", "counter", "Calls refused as too many at once.", [("", metrics.shed)]),
        "# HELP agl_call_seconds Time from sending a call on to its record.",
        "# TYPE agl_call_seconds summary",
        f"agl_call_seconds_sum {metrics.call_s}",
        f"agl_call_seconds_count {metrics.calls}",
    ]
    tokens = [('{kind="prompt"}', metrics.prompt_tokens), ('{kind="sampled"}', metrics.sampled_tokens)]
    lines += _family("agl_tokens_total", "counter", "Tokens of recorded calls.", tokens)
    refused = [(f'{{status="{status}"}}', number) for status, number in sorted(metrics.refused.items())]
    lines += _family("agl_refused_total", "counter", "Calls answered with an error, by status.", refused)
    return "\n".join(lines) + "\n"


def _split(counts: Mapping[str, int], family: str, label: str) -> list[tuple[str, float]]:
    names = sorted(name for name in counts if name.startswith(f"{family}."))
    return [(f'{{{label}="{name.removeprefix(family + ".")}"}}', counts[name]) for name in names]


def _family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *(f"{name}{labels} {value}" for labels, value in samples)]
