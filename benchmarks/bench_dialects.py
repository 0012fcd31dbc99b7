"""What each dialect costs, whole and streamed, beside chat completions.

The conversations of `bench_gateway.py`, held by 16 agents at once in the words of each dialect, with the same model
server, which answers at once. All ways take turns within every round, so that what else the machine does hits them all.

- calls a second, and their ratio to chat's of the same round, whole to whole and streamed to streamed: at least 0.7;
- the gateway's CPU time a call.

    python benchmarks/bench_dialects.py [--rounds 3] [--seconds 1.5]
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

from bench_gateway import CONNECTIONS, ROLLOUTS_AHEAD, SHAPE
from support.conversation import marked, requests
from support.load import Request, drive
from support.report import emit, table
from support.servers import Server, agl_gateway, model_stub

from agl_runtime.gateway.dialects import all_dialects

WARM_S = 0.4
LIMIT = 0.7


@dataclass
class Way:
    """A dialect, whole or streamed, with what its rounds gave."""

    name: str
    path: str
    server: Server
    bodies: list[bytes]
    taken: list[str] = field(default_factory=list)
    calls_per_s: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def conversations(self, first: int) -> Iterator[Request]:
        """The calls of one rollout after another, without end."""
        for number in range(first, first + 100_000):
            if not self.taken:
                self.taken = self.server.add_rollouts(ROLLOUTS_AHEAD)
            path, key = self.server.agent(self.taken.pop(), self.path)
            for body in self.bodies:
                yield Request(path, key, marked(body, number))

    def run(self, seconds: float) -> None:
        self.taken = self.server.add_rollouts(ROLLOUTS_AHEAD)
        before_s, first = self.server.cpu_s(), 10_000_000 * (1 + len(self.cpu_ms))
        agents = [self.conversations(first + number * 100_000) for number in range(CONNECTIONS)]
        load = asyncio.run(drive(self.server.url, agents, at_most_s=seconds + WARM_S, warm_s=WARM_S))
        self.calls_per_s.append(load.calls_per_s)
        # The CPU time covers the calls before `warm_s` too.
        spent_ms = (self.server.cpu_s() - before_s) * 1000
        self.cpu_ms.append(spent_ms / (load.calls_per_s * (load.wall_s + WARM_S)))


def every_way(server: Server) -> dict[tuple[str, bool], Way]:
    """By dialect and whether it is streamed."""
    ways = {}
    for stream in (False, True):
        for dialect in all_dialects().values():
            bodies = requests(SHAPE, stream=stream, dialect=dialect.name)
            name = f"{dialect.name}, {'streamed' if stream else 'whole'}"
            ways[dialect.name, stream] = Way(name, dialect.path, server, bodies)
    return ways


def ratio(way: Way, chat: Way) -> float:
    return statistics.median(ours / its for ours, its in zip(way.calls_per_s, chat.calls_per_s, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each round and way")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-bench-"))
        stub = stack.enter_context(model_stub(SHAPE))
        server = stack.enter_context(agl_gateway(Path(folder)))
        server.register(stub)
        ways = every_way(server)
        for way in ways.values():
            way.run(args.seconds / 2)
            way.calls_per_s.clear()
            way.cpu_ms.clear()
        for _ in range(args.rounds):
            for way in ways.values():
                way.run(args.seconds)
    ratios = {way.name: ratio(way, ways["chat", stream]) for (_, stream), way in ways.items()}
    cpu_ms = {way.name: statistics.median(way.cpu_ms) for way in ways.values()}
    speed = {way.name: statistics.median(way.calls_per_s) for way in ways.values()}
    table(["dialect", "calls/s", "ratio", "CPU ms a call"], {n: (speed[n], ratios[n], cpu_ms[n]) for n in ratios})
    least = min(ratios.values())
    result = {"calls_per_s": speed, "ratio_to_chat": ratios, "cpu_ms_per_call": cpu_ms, "least_ratio": least}
    emit("dialects", result, {"least_ratio": (LIMIT, least >= LIMIT)})
    raise SystemExit(0 if least >= LIMIT else 1)


if __name__ == "__main__":
    main()
