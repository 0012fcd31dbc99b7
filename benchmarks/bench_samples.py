"""From the record to training tensors: 64 rollouts of 100 turns, 2.6 M tokens, here and in Agent Lightning 1.0.2.

Both sides are recorded through their own gateway. agl: binary calls over HTTP, `samples.build`, `algorithms.batching`
up to `to_tensors`. 1.0.2: events as JSON over HTTP as its rollout manager fetches them, then its adapter (trajectory
level). 1.0.2 keeps all calls whole in memory (100 MB a rollout, and as much again in its trainer), so it is measured on
fewer rollouts and scaled; its path takes one rollout after the other. Its adapter hands its result over in a class of
verl's, of which a double without checks stands in (`support/reference_trainer.py`).

    python benchmarks/bench_samples.py [--rollouts 64] [--reference-rollouts 6]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from support.conversation import Shape, marked, requests
from support.load import Request, drive
from support.report import emit, table
from support.servers import HERE, Server, agl_gateway, model_stub, reference_python, reference_server

from agl_runtime.algorithms.batching import micro_batches, to_tensors, train_rows
from agl_runtime.client import GatewayClient
from agl_runtime.samples.build import build_samples
from agl_runtime.samples.types import Limits, RolloutSamples
from agl_runtime.trainer.backends.base import BatchTotals, ScoredRollout

SHAPE = Shape(turns=100, first=800, sampled=200, observed=200)
LIMITS = Limits(max_prompt_tokens=1024, max_response_tokens=40_000)
TOKEN_BUDGET = 65_536
FETCHES = 8
RECORDERS = 4
REPEATS = 3
LEAST_RATIO = 20.0
TRAINER_NEEDS = ("torch==2.13.0", "tensordict==0.10.0", "numpy==2.4.6")


def record(server: Server, stub: str, rollouts: int) -> list[str]:
    """Play the conversations and end them with a reward."""
    server.register(stub)
    names = server.add_rollouts(rollouts)
    bodies = requests(SHAPE)

    def calls(own: list[tuple[int, str]]) -> Iterator[Request]:
        for number, name in own:
            path, key = server.agent(name)
            yield from (Request(path, key, marked(body, number)) for body in bodies)

    numbered = list(enumerate(names))
    agents = [calls(numbered[first::RECORDERS]) for first in range(RECORDERS)]
    load = asyncio.run(drive(server.url, agents, at_most_s=900.0))
    if load.calls != rollouts * SHAPE.turns:
        raise SystemExit(f"{server.name} recorded only {load.calls} calls in {load.wall_s:.0f} s.")
    for number, name in numbered:
        server.finish(name, float(number % 2))
    return names


async def ours(server: Server, names: list[str]) -> dict[str, float]:
    """Seconds of each stage, and the tokens in the tensors."""
    began = time.perf_counter()
    fetching = asyncio.Semaphore(FETCHES)
    async with GatewayClient(server.url, server.key) as client:

        async def samples(name: str) -> RolloutSamples:
            async with fetching:
                return build_samples(await client.calls(name), LIMITS)

        built = await asyncio.gather(*map(samples, names))
    fetched = time.perf_counter()
    scored = [ScoredRollout(f"g{n // 2}", n % 2, n % 2 - 0.5, each) for n, each in enumerate(built)]
    rows = sum(len(each.samples) for each in built)
    trained = sum(each.report.trained_tokens for each in built)
    batch = train_rows(scored, BatchTotals(len(built), rows, trained), "rollout")
    tensors = [to_tensors(micro, 0) for micro in micro_batches(batch, TOKEN_BUDGET)]
    ended = time.perf_counter()
    tokens = sum(int(each.attention.sum()) for each in tensors)
    if trained != len(names) * SHAPE.turns * SHAPE.sampled:
        raise SystemExit(f"Only {trained} sampled tokens train.")
    return {"fetch_and_build_s": fetched - began, "tensors_s": ended - fetched, "s": ended - began, "tokens": tokens}


def theirs(server: Server, names: list[str]) -> dict[str, float]:
    """As `ours`, in a process of the reference's own environment."""
    limits = [str(LIMITS.max_prompt_tokens), str(LIMITS.max_response_tokens)]
    command = [reference_python(*TRAINER_NEEDS), "-m", "support.reference_trainer", server.url, server.key, *limits]
    done = subprocess.run([*command, *names], cwd=HERE, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    return min(runs, key=lambda run: run["s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--reference-rollouts", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as name, model_stub(SHAPE) as stub:
        with reference_server(Path(name)) as server:
            names = record(server, stub, args.reference_rollouts)
            reference = best([theirs(server, names) for _ in range(REPEATS)])
        with agl_gateway(Path(name)) as server:
            names = record(server, stub, args.rollouts)
            agl = best([asyncio.run(ours(server, names)) for _ in range(REPEATS)])
    scale = args.rollouts / args.reference_rollouts
    scaled = {stage: value * scale for stage, value in reference.items()}
    rows = {
        "agentlightning 1.0.2": [scaled["fetch_and_build_s"], scaled["tensors_s"], scaled["s"]],
        "agl": [agl["fetch_and_build_s"], agl["tensors_s"], agl["s"]],
    }
    table([f"{agl['tokens'] / 1e6:.2f} M tokens", "fetch s", "to tensors s", "whole s"], rows)
    ratio = scaled["s"] / agl["s"]
    result = {"rollouts": args.rollouts, "reference_rollouts": args.reference_rollouts}
    result |= {"agentlightning_scaled": scaled, "agl": agl, "ratio": ratio}
    emit("samples", result, {"ratio": (LEAST_RATIO, ratio >= LEAST_RATIO)})


if __name__ == "__main__":
    main()
