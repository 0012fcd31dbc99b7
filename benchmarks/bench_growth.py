"""What one long rollout leaves behind, here and in Agent Lightning 1.0.2: 100 turns that add 500 tokens each.

An agent resends its whole conversation each turn. 1.0.2 keeps every call whole in the server's memory; agl keeps in its
store what is new. Measured after 50 and after 100 turns: growth of the server's own memory, growth of the store's file
(of a gateway that was stopped, less that of an empty store), and the size of what the trainer fetches: 1.0.2's triplet
events, agl's binary export.

    python benchmarks/bench_growth.py
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from support.conversation import Shape, marked, requests
from support.load import Request, drive
from support.report import emit, table
from support.servers import Server, agl_gateway, model_stub, reference_server, size, store_bytes

TURNS = (50, 100)
FIRST, SAMPLED, OBSERVED = 500, 200, 300
MOST_BYTES = 2_000_000
LINEAR = 1.1
MB = 1e6


def grow(open_server: Callable[[Path], AbstractContextManager[Server]], turns: int) -> dict[str, float]:
    """Bytes of memory, store and export that a rollout of `turns` turns adds."""
    shape = Shape(turns, FIRST, SAMPLED, OBSERVED)
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as name, model_stub(shape) as stub:
        folder = Path(name)
        with open_server(folder) as server:
            warm_up(server, stub, shape)
        empty_bytes = store_bytes(folder)
        with open_server(folder) as server:
            warm_up(server, stub, shape)
            before_bytes = server.memory_bytes()
            rollout_id = play(server, shape, shape.turns)
            memory_bytes = server.memory_bytes() - before_bytes
            path = "calls" if server.scoped else "events?format=triplet"
            export_bytes = size(f"{server.url}/api/rollouts/{rollout_id}/{path}", server.key)
        return {"memory": memory_bytes, "store": store_bytes(folder) - empty_bytes, "export": export_bytes}


def warm_up(server: Server, stub: str, shape: Shape) -> None:
    """A first short rollout, so that what a server makes once does not count."""
    server.register(stub)
    play(server, shape, 1)


def play(server: Server, shape: Shape, turns: int) -> str:
    [rollout_id] = server.add_rollouts(1)
    path, key = server.agent(rollout_id)
    calls = (Request(path, key, marked(body, turns)) for body in requests(shape)[:turns])
    asyncio.run(drive(server.url, [calls], at_most_s=300.0))
    return rollout_id


def main() -> None:
    sides = {"agentlightning 1.0.2": reference_server, "agl": agl_gateway}
    grown = {name: {turns: grow(opened, turns) for turns in TURNS} for name, opened in sides.items()}
    rows = {
        f"{name}, {turns} turns": [found[what] / MB for what in ("memory", "store", "export")]
        for name, by_turns in grown.items()
        for turns, found in by_turns.items()
    }
    table(["MB that a rollout adds", "memory", "store", "export"], rows)
    half, whole = (grown["agl"][turns] for turns in TURNS)
    linear = {what: whole[what] / half[what] / (TURNS[1] / TURNS[0]) for what in ("store", "export")}
    theirs = grown["agentlightning 1.0.2"][TURNS[1]]
    ratios = {"kept": theirs["memory"] / whole["store"], "export": theirs["export"] / whole["export"]}
    limits = {
        "store_bytes": (MOST_BYTES, whole["store"] <= MOST_BYTES),
        "export_bytes": (MOST_BYTES, whole["export"] <= MOST_BYTES),
        "linear": (LINEAR, max(linear.values()) <= LINEAR),
    }
    result = {"bytes": {name: {str(t): found for t, found in each.items()} for name, each in grown.items()}}
    emit("growth", {**result, "ratios": ratios, "agl_100_turns_over_twice_50": linear}, limits)


if __name__ == "__main__":
    main()
