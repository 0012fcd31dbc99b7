"""Groups a minute of asynchronous over synchronous training, through the real parts and by simulation.

The gateway is a process of its own with its store; the trainer's loop and state machine and the controller run here.
Only three things are played: the model server answers at once, an update takes 1 s and learns nothing, and an agent is
a coroutine that calls its model over HTTP, waits, calls again and waits, for as long as `simulate_schedule.py` says. So
each run has a prediction by simulation for the very same agents. 8 groups of 4 make an update, 32 agents run at once.

Group for group the durations are the same in all runs, and asynchronous runs have twice the steps. The curve over the
number of active groups shows the staleness that each costs. `cores` is the CPU that all parts together got: a machine
that is busy otherwise falls behind the simulation. `--scale 0.5` halves all durations.

    python benchmarks/bench_schedule.py [--steps 16] [--active 12 16 24 32] [--scale 1] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from simulate_schedule import BATCH, GROUP_SIZE, SLOTS, UPDATE_S, Outcome, duration_s, plan, simulate

from agl_runtime.client import GatewayClient
from agl_runtime.config import Config, Project, TrainConfig, load_project
from agl_runtime.controller.loop import Controller, Settings
from agl_runtime.controller.runners.base import AgentExit, AgentRun, Kept
from agl_runtime.part import METRICS_FILE, SUMMARY_FILE, Part, admin_key, gateway_url
from agl_runtime.schemas import Grant
from agl_runtime.trainer import modes
from agl_runtime.trainer.backends.base import BatchTotals, ScoredRollout, UpdateResult

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from fakes.backend import FakeBackend
from fakes.model_server import FakeModelServer

HEADLINE = 16
OVER_SYNCHRONOUS = 3.0
OF_SIMULATED = 0.8
START_S = 60.0
MakeBackend = Callable[[Config, Path], Any]
MakeRunner = Callable[[GatewayClient, aiohttp.ClientSession], Any]


class Backend(FakeBackend):
    def __init__(self, endpoint: str, update_s: float) -> None:
        super().__init__(endpoint)
        self._update_s = update_s

    async def update(self, rollouts: Sequence[ScoredRollout], totals: BatchTotals) -> UpdateResult:
        await asyncio.sleep(self._update_s)
        return await super().update(rollouts, totals)


@dataclass(frozen=True)
class Agents:
    """A runner of agents that are coroutines: `act` is the agent, and `pause_s` how long one takes beside its calls."""

    client: GatewayClient
    http: aiohttp.ClientSession
    seed: int
    scale: float
    isolation: str = "none: played"
    starts: str = "cold: played"

    async def run(self, grant: Grant, expired: asyncio.Event) -> AgentRun:
        began = time.monotonic()
        reward = await self.act(grant)
        if reward is not None:
            data = {"value": reward, "source": "agent"}
            await self.client.add_event(grant.rollout.rollout_id, grant.attempt_id, "reward", data)
        ended = AgentExit(0 if reward is not None else 1, None, False, time.monotonic() - began, 0.0, 0.0)
        return AgentRun(ended, Kept("", 0), Kept("", 0), Path())

    async def release(self, grant: Grant) -> None:
        """Nothing was kept."""

    def base_url(self, grant: Grant) -> str:
        rollout = grant.rollout
        place = f"rollout/{rollout.rollout_id}/attempt/{grant.attempt_id}/mode/{rollout.mode}"
        return f"{self.client.url}/proxy/{place}/openai/v1"

    def pause_s(self, grant: Grant) -> float:
        about = grant.rollout.metadata.model_extra or {}
        return duration_s(self.seed, int(about["group_id"].split("-")[2]), about["index"]) * self.scale

    async def act(self, grant: Grant) -> float | None:
        """The reward; None when the rollout was ended meanwhile. Two calls, each followed by half of the pause."""
        for turn in range(2):
            body = {"model": "policy", "messages": [{"role": "user", "content": f"turn {turn}"}]}
            key = {"Authorization": f"Bearer {grant.agent_key}"}
            async with self.http.post(f"{self.base_url(grant)}/chat/completions", json=body, headers=key) as response:
                await response.read()
            if response.status != 200:
                return None
            await asyncio.sleep(self.pause_s(grant) / 2)
        return float((grant.rollout.metadata.model_extra or {})["index"] % 2)


def make_project(root: Path, steps: int, active: int) -> Project:
    (root / "base").mkdir()
    (root / "base" / "config.json").write_text("{}")
    (root / "train.jsonl").write_text("\n".join(json.dumps({"id": n}) for n in range(1000)) + "\n")
    settings = {
        "agent": {"command": "played", "concurrency": SLOTS, "reports_reward": True},
        "data": {"train": "train.jsonl", "shuffle": False},
        "model": {"path": "base"},
        "train": {"steps": steps, "groups_per_step": BATCH, "group_size": GROUP_SIZE, "active_groups": active},
    }
    (root / "agl.yaml").write_text(json.dumps(settings))
    return load_project(root, environ={})


@contextmanager
def gateway(project: Project) -> Iterator[None]:
    command = [sys.executable, "-m", "agl_runtime.gateway", "--root", str(project.root)]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        give_up_at = time.monotonic() + START_S
        while not (project.state_dir / "run" / "gateway.json").exists():
            if time.monotonic() > give_up_at or child.poll() is not None:
                raise SystemExit("The gateway did not start.")
            time.sleep(0.05)
        yield
    finally:
        child.terminate()
        child.wait()


@asynccontextmanager
async def at_work(client: GatewayClient, runner: Agents) -> AsyncIterator[None]:
    """The real controller, with played agents."""
    stop = asyncio.Event()
    settings = Settings("bench", SLOTS, attempts=1, timeout_s=3600.0, reports_reward=True)
    async with asyncio.TaskGroup() as group:  # a controller that fails ends the run
        group.create_task(Controller(client, runner, None, settings).run(stop))
        yield
        stop.set()


async def train(project: Project, make: MakeBackend, runner: MakeRunner) -> list[dict[str, Any]]:
    """One run to its end; the lines of its metrics."""
    url, key = gateway_url(project.state_dir), admin_key(project.state_dir)

    async def connect(part: Part) -> GatewayClient:
        return GatewayClient(url, key)

    part = Part(project, argparse.Namespace(), key)
    unlimited = aiohttp.TCPConnector(limit=0)
    async with (
        GatewayClient(url, key) as client,
        aiohttp.ClientSession(connector=unlimited) as http,
        at_work(client, runner(client, http)),
    ):
        await modes.train(part, asyncio.Event(), modes.Outside(make, connect))
    if json.loads((project.state_dir / SUMMARY_FILE).read_text())["ended"] != "complete":
        raise SystemExit("The run did not complete.")
    return [json.loads(line) for line in (project.state_dir / METRICS_FILE).read_text().splitlines()]


def measure(project: Project, seed: int, scale: float) -> Outcome:
    """Seconds as they would be at scale 1."""
    with FakeModelServer() as model:
        lines = asyncio.run(
            train(
                project,
                lambda config, policy: Backend(model.url, UPDATE_S * scale),
                lambda client, http: Agents(client, http, seed, scale),
            )
        )
    origin = lines[0]["elapsed_s"] - sum(lines[0][name] for name in ("sample_s", "hold_s", "save_s"))
    return Outcome(
        ends=[(line["elapsed_s"] - origin) / scale for line in lines],
        means=[line["staleness_mean"] for line in lines],
        most=[line["staleness_max"] for line in lines],
        dropped=sum(line["groups_dropped"] for line in lines),
    )


def cpu_s() -> float:
    """Of this process and of the gateways that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def run(steps: int, active: int, seed: int, scale: float) -> dict[str, Any]:
    began, used = time.monotonic(), cpu_s()
    with tempfile.TemporaryDirectory() as folder:
        project = make_project(Path(folder), steps, active)
        with gateway(project):
            measured = measure(project, seed, scale)
    predicted = simulate(plan(steps, active, project.config.train.max_staleness), seed).figures(active)
    figures = measured.figures(active)
    share = figures["groups_per_minute"] / predicted["groups_per_minute"]
    cores = round((cpu_s() - used) / (time.monotonic() - began), 2)
    return {"active": active, **figures, "of_simulated": round(share, 3), "cores": cores, "simulated": predicted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=16, help="of the synchronous run; at least 5")
    parser.add_argument("--active", type=int, nargs="+", default=[12, HEADLINE, 24, 32])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    columns = ("active", "groups/min", "over sync", "of simulated", "staleness", "most", "dropped", "cores")
    print("".join(f"{name:>14}" for name in columns))
    for active in [BATCH, *args.active]:
        row = run(args.steps * (1 if active == BATCH else 2), active, args.seed, args.scale)
        rows.append(
            {**row, "over_synchronous": round(row["groups_per_minute"] / (rows or [row])[0]["groups_per_minute"], 2)}
        )
        names = ("groups_per_minute", "over_synchronous", "of_simulated", "staleness_mean", "staleness_max")
        shown = [active, *(rows[-1][name] for name in names), f"{row['dropped_share']:.1%}", row["cores"]]
        print("".join(f"{value:>14}" for value in shown), flush=True)
    judged = [row for row in rows if row["active"] == HEADLINE]
    good = [row["over_synchronous"] >= OVER_SYNCHRONOUS and row["of_simulated"] >= OF_SIMULATED for row in judged]
    result = {
        "benchmark": "schedule",
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 1),
        "python": sys.version.split()[0],
        **vars(args),
        "max_staleness": TrainConfig().max_staleness,
        "rows": rows,
        "at_least": {"over_synchronous": OVER_SYNCHRONOUS, "of_simulated": OF_SIMULATED},
        "within_limit": all(good) if good else None,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
