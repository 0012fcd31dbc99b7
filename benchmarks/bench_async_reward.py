"""Pass@1 after equal numbers of updates, synchronous and asynchronous, on the embedded backend and over seeds.

examples/calculator with its warm policy, through the real gateway, trainer, controller and backend. Only the agents are
played: the example's own loop as coroutines in place of processes, each with a log-normal pause before it reports, so
that groups really carry over. Validation before and after is the trainer's own, all held-out tasks at temperature 1.
The interval is Student's, 95 %, over seeds.

    python benchmarks/bench_async_reward.py [--seeds 0 1 2] [--active 4 8 12] [--steps 12]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import aiohttp
from bench_schedule import Agents, gateway, train
from demo_policy import EXAMPLE, answer, example
from openai import APIStatusError, AsyncOpenAI

from agl_runtime.client import GatewayClient
from agl_runtime.config import Project, load_project
from agl_runtime.schemas import Grant
from agl_runtime.trainer.modes import make_backend

PAUSE_SCALE = 0.2
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


@dataclass(frozen=True)
class Calculators(Agents):
    openai: AsyncOpenAI = field(kw_only=True)
    agent: ModuleType = field(default_factory=lambda: example("agent"))
    reward: ModuleType = field(default_factory=lambda: example("reward"))

    async def act(self, grant: Grant) -> float | None:
        client = self.openai.with_options(base_url=self.base_url(grant), api_key=grant.agent_key)
        task = grant.rollout.input
        try:
            said = await answer(client, self.agent, task["question"], 1.0)
        except APIStatusError:
            return None  # the rollout was ended meanwhile
        if grant.rollout.is_train:
            await asyncio.sleep(self.pause_s(grant))
        return float(self.reward.reward(task, {"stdout": said}))


async def learn(project: Project, seed: int) -> list[dict[str, Any]]:
    async with AsyncOpenAI(api_key="none", max_retries=0) as openai:

        def runner(client: GatewayClient, http: aiohttp.ClientSession) -> Calculators:
            return Calculators(client, http, seed, PAUSE_SCALE, openai=openai)

        return await train(project, make_backend, runner)


def run(seed: int, active: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "calculator"
        shutil.copytree(EXAMPLE, root)
        chosen = {
            "agent.reports_reward": "true",
            "reward.function": "null",
            "train.active_groups": str(active),
            "train.steps": str(steps),
            "train.seed": str(seed),
        }
        project = load_project(root, overrides=chosen, environ={})
        with gateway(project):
            lines = asyncio.run(learn(project, seed))
        summary = json.loads((project.state_dir / "summary.json").read_text())
    updates = [line for line in lines if line["kind"] == "step"]
    return {
        "seed": seed,
        "active": active,
        "before": summary["before"]["pass_at_1"],
        "after": summary["after"]["pass_at_1"],
        "staleness_mean": round(fmean(line["staleness_mean"] for line in updates), 2),
        "groups_dropped": sum(line["groups_dropped"] for line in updates),
        "tis_weight": round(fmean(line["tis_weight"] for line in updates), 4),
        "tis_capped": round(fmean(line["tis_capped"] for line in updates), 4),
        "logprob_gap_max": summary["logprob_gap_max"],
        "train_seconds": summary["train_seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="at most 10")
    parser.add_argument("--active", type=int, nargs="+", default=[4, 8, 12])
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    intervals = []
    print(f"{'active':>6} {'before':>7} {'after':>7} {'95 % over seeds':>18} {'staleness':>10} {'seconds':>8}")
    for active in args.active:
        own = [run(seed, active, args.steps) for seed in args.seeds]
        mean = {name: fmean(each[name] for each in own) for name in own[0]}
        after = [each["after"] for each in own]
        half = STUDENT[len(own)] * stdev(after) / math.sqrt(len(own)) if len(own) > 1 else 1.0
        low, high = max(0.0, mean["after"] - half), min(1.0, mean["after"] + half)
        print(
            f"{active:>6} {mean['before']:>7.3f} {mean['after']:>7.3f} {f'{low:.3f} to {high:.3f}':>18} "
            f"{mean['staleness_mean']:>10.2f} {mean['train_seconds']:>8.1f}",
            flush=True,
        )
        runs += own
        intervals.append(
            {"active": active, "after": round(mean["after"], 4), "low": round(low, 4), "high": round(high, 4)}
        )
    result = {"benchmark": "async_reward", "cores": os.cpu_count(), "python": sys.version.split()[0], **vars(args)}
    print(json.dumps({**result, "intervals": intervals, "runs": runs}))


if __name__ == "__main__":
    main()
