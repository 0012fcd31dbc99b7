"""What the gateway costs between agents and a model server, beside Agent Lightning 1.0.2's and beside no gateway.

Agents hold conversations of 8 turns and resend all of it each turn: on average 2,000 prompt ids a call, and 200 sampled
with log-probabilities; 16 agents at once. The model server answers at once with bytes made beforehand. agl runs with
its durable store and a key for each rollout, 1.0.2 as it ships.

- whole answers: requests a second and the gateway's CPU time a call, in rounds that alternate between the three;
- streamed answers (which 1.0.2 refuses): events a second, as a share of what the model server does alone;
- 64 agents with a model that takes a second: the median time that the gateway adds.

    python benchmarks/bench_gateway.py [--rounds 3] [--seconds 4]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.conversation import Shape, marked, requests
from support.load import Load, Request, drive
from support.report import emit, table
from support.servers import Server, agl_gateway, model_stub, reference_server

SHAPE = Shape(turns=8, first=1020, sampled=200, observed=80)
CONNECTIONS = 16
SLOW_AGENTS = 64
SLOW_S = 1.0
SLOW_CALLS = 8
ROLLOUTS_AHEAD = 200
WARM_S = 0.5
BARE = "bare model server"
LIMITS = {"requests_ratio": 5.0, "streamed_share": 0.4, "added_median_ms": 10.0}


@dataclass
class Side:
    """One way to the model server. `server` is None for none."""

    name: str
    url: str
    server: Server | None = None
    taken: list[str] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    calls_per_s: float = 0.0

    def conversations(self, bodies: list[bytes], first: int) -> Iterator[Request]:
        """The calls of one rollout after another, without end."""
        number = first
        while True:
            number += 1
            path, key = ("/v1/chat/completions", "") if self.server is None else self.server.agent(self.rollout())
            for body in bodies:
                yield Request(path, key, marked(body, number))

    def rollout(self) -> str:
        if not self.taken and self.server is not None:
            self.taken = self.server.add_rollouts(ROLLOUTS_AHEAD)
        return self.taken.pop()

    def run(self, bodies: list[bytes], seconds: float) -> Load:
        """Rollouts for it are made before, twice as many as the last run used."""
        ahead = ROLLOUTS_AHEAD + int(2 * self.calls_per_s * seconds / len(bodies))
        if self.server is not None and len(self.taken) < ahead:
            self.taken += self.server.add_rollouts(ahead)
        before_s = self.cpu_s()
        first = 10_000_000 * (1 + len(self.loads))
        agents = [self.conversations(bodies, first + number * 100_000) for number in range(CONNECTIONS)]
        load = asyncio.run(drive(self.url, agents, at_most_s=seconds + WARM_S, warm_s=WARM_S))
        # The CPU time covers the calls before `warm_s` too.
        self.cpu_ms.append((self.cpu_s() - before_s) * 1000 / (load.calls_per_s * (load.wall_s + WARM_S)))
        self.loads.append(load)
        self.calls_per_s = load.calls_per_s
        return load

    def cpu_s(self) -> float:
        return self.server.cpu_s() if self.server is not None else 0.0


def alternate(sides: list[Side], bodies: list[bytes], rounds: int, seconds: float) -> None:
    for side in sides:
        side.loads.clear()
        side.cpu_ms.clear()
        side.run(bodies, 1.0)
        side.loads.clear()
        side.cpu_ms.clear()
    for _ in range(rounds):
        for side in sides:
            side.run(bodies, seconds)


def whole_answers(sides: list[Side], rounds: int, seconds: float) -> dict[str, Any]:
    alternate(sides, requests(SHAPE), rounds, seconds)
    rows = {
        side.name: (
            statistics.median(load.calls_per_s for load in side.loads),
            statistics.median(side.cpu_ms) if side.server else None,
            1000 * statistics.median(latency for load in side.loads for latency in load.latencies_s),
        )
        for side in sides
    }
    table(["whole answers", "requests/s", "CPU ms a call", "median ms"], rows)
    _, reference, agl = sides
    ratios = [ours.calls_per_s / theirs.calls_per_s for ours, theirs in zip(agl.loads, reference.loads, strict=True)]
    return {
        "requests_per_s": {name: row[0] for name, row in rows.items()},
        "cpu_ms_per_call": {name: row[1] for name, row in rows.items() if row[1] is not None},
        "requests_ratio_of_rounds": ratios,
        "requests_ratio": statistics.median(ratios),
    }


def streamed_answers(sides: list[Side], rounds: int, seconds: float) -> dict[str, Any]:
    bare, _, agl = sides
    alternate([bare, agl], requests(SHAPE, stream=True), rounds, seconds)
    rows = {
        side.name: (
            statistics.median(load.events_per_s for load in side.loads),
            1000 * statistics.median(side.cpu_ms) / (SHAPE.sampled + 2) if side.server else None,
        )
        for side in (bare, agl)
    }
    table(["streamed answers", "events/s", "CPU us an event"], rows)
    shares = [ours.events_per_s / theirs.events_per_s for ours, theirs in zip(agl.loads, bare.loads, strict=True)]
    return {
        "streamed_events_per_s": {name: row[0] for name, row in rows.items()},
        "streamed_shares_of_rounds": shares,
        "streamed_share": statistics.median(shares),
    }


def added_latency(sides: list[Side]) -> dict[str, Any]:
    """Agents begin spread over a second, so that they do not all call at once for ever."""
    bodies = requests(SHAPE)
    medians_ms = {}
    for side in sides:
        agents = []
        for number in range(SLOW_AGENTS):
            calls = side.conversations(bodies, 10_000_000 * 9 + number * 100_000)
            agents.append(next(calls) for _ in range(SLOW_CALLS))
        load = asyncio.run(drive(side.url, agents, at_most_s=60.0, spread_s=SLOW_S))
        medians_ms[side.name] = statistics.median(load.latencies_s) * 1000
    bare = medians_ms[BARE]
    rows = {name: (value, value - bare) for name, value in medians_ms.items()}
    table([f"{SLOW_AGENTS} agents, a model of 1 s", "median ms", "added ms"], rows)
    return {"added_median_ms": {name: row[1] for name, row in rows.items() if name != BARE}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each round and side")
    args = parser.parse_args()
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-bench-"))) for _ in range(2)]
        fast, slow = stack.enter_context(model_stub(SHAPE)), stack.enter_context(model_stub(SHAPE, SLOW_S))
        reference = stack.enter_context(reference_server(folders[0]))
        agl = stack.enter_context(agl_gateway(folders[1]))
        sides = [Side(BARE, fast), Side(reference.name, reference.url, reference), Side(agl.name, agl.url, agl)]
        for server in (reference, agl):
            server.register(fast)
        result = whole_answers(sides, args.rounds, args.seconds)
        result |= streamed_answers(sides, args.rounds, args.seconds)
        for server in (reference, agl):
            send_to(server, slow)
        sides[0].url = slow
        result |= added_latency(sides)
    added = result["added_median_ms"]["agl"]
    limits = {
        "requests_ratio": (LIMITS["requests_ratio"], result["requests_ratio"] >= LIMITS["requests_ratio"]),
        "streamed_share": (LIMITS["streamed_share"], result["streamed_share"] >= LIMITS["streamed_share"]),
        "added_median_ms": (LIMITS["added_median_ms"], added < LIMITS["added_median_ms"]),
    }
    emit("gateway", {"shape": f"{SHAPE.mean_prompt_tokens:.0f} prompt ids on average", **result}, limits)


def send_to(server: Server, endpoint: str) -> None:
    """Leave the model server that it has for another one."""
    server.clear_models()
    server.register(endpoint)


if __name__ == "__main__":
    main()
