"""A bounded soak: 256 rollouts in flight through every part, memory and errors watched from outside.

`agl up` runs gateway, controller and the embedded trainer with a tiny policy; the trainer keeps twice as many rollouts
under way as agents run, so that none is ever free. Most agents are coroutines of one more controller, in a process of
its own and on the same gateway; 16 are processes of the standard library. An agent makes three calls, every other one
streamed, and waits some seconds after each, so that 2 cores are enough. The store keeps 1,000 finished rollouts.

Watched: the memory of each part (median of the samples around a quarter of the time and at its end, and the slope
between), what failed and why, and the store's size. Bounds: between a quarter and the end no part grows by more than a
tenth and 16 MB; nothing failed without a reason; no more finished rollouts are kept than retention and the minute
between two prunings allow. Prints tables, then one JSON object.

    python benchmarks/bench_soak.py [--seconds 600] [--agents 256] [--processes 16]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median

import aiohttp
import psutil
from support.report import emit, table
from support.servers import end

from agl_cli.runstate import read_record
from agl_runtime.client import GatewayClient
from agl_runtime.controller.attempt import Settings
from agl_runtime.controller.loop import Controller
from agl_runtime.controller.runners.base import AgentExit, AgentRun, Kept
from agl_runtime.errors import NotFoundError
from agl_runtime.part import STORE_FILE, admin_key, gateway_url, stop_event
from agl_runtime.schemas import Grant, RolloutState

TESTS = Path(__file__).resolve().parent.parent / "tests"
GROUP_SIZE, BATCH, KEPT, PRUNE_S = 4, 32, 1000, 60.0
TURNS, PAUSE_S = 3, 6.0
SAMPLE_S = 2.0
START_S = 180.0
GROWN_SHARE, GROWN_MB = 0.1, 16.0

AGENT = f"""
import json, os, random, time, urllib.request

key = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}

def post(url, body):
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), key), timeout=300) as answer:
        return answer.read()

messages = []
for turn in range({TURNS}):
    messages.append({{"role": "user", "content": f"turn {{turn}}"}})
    body = {{"model": "policy", "messages": messages, "stream": turn % 2 == 1}}
    post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    time.sleep(random.expovariate(1 / {PAUSE_S}))
post(os.environ["AGL_EVENT_URL"], {{"event_type": "reward", "data": {{"value": random.random()}}}})
"""


def make_project(root: Path, agents: int, processes: int) -> None:
    sys.path.append(str(TESTS))
    from fakes.tiny_model import make_tiny_policy  # imports torch, which the played agents' process does without

    settings = {
        "agent": {
            "command": [sys.executable, "-I", "agent.py"],
            "concurrency": processes,
            "reports_reward": True,
            "timeout_s": 120,
        },
        "data": {"train": "tasks.jsonl"},
        "model": {"path": "policy", "max_tokens": 16},
        "gateway": {"keep_rollouts": KEPT},
        "train": {
            "steps": 1_000_000,
            "groups_per_step": BATCH,
            "group_size": GROUP_SIZE,
            "active_groups": 2 * agents // GROUP_SIZE,
            "max_staleness": None,
            "lr": 1e-5,
            "no_signal_steps": 1000,
        },
    }
    (root / "agl.yaml").write_text(json.dumps(settings))
    (root / "agent.py").write_text(AGENT)
    (root / "tasks.jsonl").write_text("".join(json.dumps({"id": f"t{n}"}) + "\n" for n in range(100)))
    make_tiny_policy(root / "policy")


@dataclass(frozen=True)
class Played:
    """A runner whose agents are coroutines."""

    client: GatewayClient
    http: aiohttp.ClientSession
    isolation: str = "none: played"
    starts: str = "cold"

    async def run(self, grant: Grant, expired: asyncio.Event) -> AgentRun:
        began = time.monotonic()
        failure = await self._act(grant)
        if failure is None:
            reward = {"value": random.random(), "source": "agent"}
            await self.client.add_event(grant.rollout.rollout_id, grant.attempt_id, "reward", reward)
        ended = AgentExit(1 if failure else 0, None, False, time.monotonic() - began, 0.0, 0.0)
        return AgentRun(ended, Kept("", 0), Kept(failure or "", 0), Path())

    async def release(self, grant: Grant) -> None:
        """Nothing was kept."""

    async def _act(self, grant: Grant) -> str | None:
        rollout = grant.rollout
        place = f"rollout/{rollout.rollout_id}/attempt/{grant.attempt_id}/mode/{rollout.mode}"
        url = f"{self.client.url}/proxy/{place}/openai/v1/chat/completions"
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"turn {turn}"})
            body = {"model": "policy", "messages": messages, "stream": turn % 2 == 1}
            key = {"Authorization": f"Bearer {grant.agent_key}"}
            async with self.http.post(url, json=body, headers=key) as response:
                text = await response.text()
            if response.status != 200:
                return text
            await asyncio.sleep(random.expovariate(1 / PAUSE_S))
        return None


async def play(root: Path, agents: int) -> None:
    """The controller of the played agents, until SIGTERM."""
    state_dir = root / ".agl"
    settings = Settings("soak", agents, attempts=3, timeout_s=120.0, reports_reward=True)
    async with (
        GatewayClient(gateway_url(state_dir), admin_key(state_dir)) as client,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        await Controller(client, Played(client, http), None, settings).run(stop_event())


@contextlib.contextmanager
def child(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=out)
    try:
        yield process
    finally:
        end(process)


@dataclass
class Watched:
    """`memory` holds (seconds, MB) of each part; `failed` counts the rollouts that failed, by their reasons."""

    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    in_flight: list[int] = field(default_factory=list)
    store_mb: list[tuple[float, float]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    per_prune: int = 0

    async def watch(self, client: GatewayClient, state_dir: Path, parts: dict[str, int], seconds: float) -> None:
        began, ends = time.monotonic(), [(0.0, 0)]
        while (now := time.monotonic() - began) < seconds:
            for name, pid in parts.items():
                self.memory.setdefault(name, []).append((now, psutil.Process(pid).memory_info().rss / 2**20))
            store = sum(file.stat().st_size for file in state_dir.glob(f"{STORE_FILE}*") if file.exists())
            self.store_mb.append((now, store / 2**20))
            counts = await client.counts()
            self.in_flight.append(counts[f"rollouts.{RolloutState.RUNNING}"])
            self.kept.append(sum(counts[f"rollouts.{state}"] for state in ("succeeded", "failed")))
            self.calls = {name: count for name, count in counts.items() if name.startswith("calls.")}
            await self._follow(client)
            ends.append((now, self.ended))
            lately = next(count for then, count in ends if now - then <= PRUNE_S + 2 * SAMPLE_S)
            self.per_prune = max(self.per_prune, self.ended - lately)
            await asyncio.sleep(SAMPLE_S)

    async def _follow(self, client: GatewayClient) -> None:
        while (page := await client.terminal(self.ended)).items:
            self.ended = page.next_after
            for item in page.items:
                if item.state is RolloutState.FAILED:
                    try:
                        detail = await client.rollout(item.rollout_id)
                    except NotFoundError:
                        self.failed["pruned before it was read"] += 1
                        continue
                    self.failed[readable(detail.rollout.status.error_message)] += 1

    def figures(self) -> dict[str, dict[str, float]]:
        found = {}
        for name, samples in self.memory.items():
            last = samples[-1][0]
            quarter = median(mb for at, mb in samples if 0.2 * last <= at <= 0.3 * last)
            late = median(mb for at, mb in samples if at >= 0.9 * last)
            later = [(at, mb) for at, mb in samples if at >= 0.25 * last]
            slope = linear_regression([at / 60 for at, _ in later], [mb for _, mb in later]).slope
            found[name] = {"quarter_mb": quarter, "end_mb": late, "slope_mb_per_min": slope}
        return found


def readable(reason: str | None) -> str:
    """A reason without what differs from case to case."""
    return re.sub(r"\d+", "N", reason)[:100] if reason else "no reason"


def logged(state_dir: Path) -> Counter[str]:
    """Errors and tracebacks in the parts' logs."""
    found: Counter[str] = Counter()
    for log in (state_dir / "logs").glob("*.log"):
        for line in log.read_text(errors="replace").splitlines():
            if " ERROR " in line or line.startswith("Traceback"):
                found[readable(f"{log.stem}: {line.partition(' ERROR ')[2] or line}")] += 1
    return found


async def soak(root: Path, args: argparse.Namespace) -> tuple[Watched, Counter[str], int]:
    state_dir = root / ".agl"
    agl = [sys.executable, "-m", "agl_cli.main", "up", "--json", "--project", str(root)]
    played = [sys.executable, __file__, "--play", str(root), "--agents", str(args.agents - args.processes)]
    watched = Watched()
    with child(agl, root / "up.log") as up:
        give_up_at = time.monotonic() + START_S
        while (record := read_record(state_dir)) is None or not (state_dir / "run/gateway.json").exists():
            if up.poll() is not None or time.monotonic() > give_up_at:
                raise SystemExit((root / "up.log").read_text())
            await asyncio.sleep(0.2)
        with child(played, root / "played.log") as players:
            async with GatewayClient(gateway_url(state_dir), admin_key(state_dir)) as client:
                while (await client.counts())["rollouts.succeeded"] < args.agents // 4:
                    if up.poll() is not None or time.monotonic() > give_up_at:
                        raise SystemExit((root / "up.log").read_text())
                    await asyncio.sleep(0.5)
                parts = {name: part.pid for name, part in record.parts.items()}
                parts |= {"supervisor": up.pid, "played agents": players.pid}
                await watched.watch(client, state_dir, parts, args.seconds)
        up.send_signal(signal.SIGTERM)
        code = up.wait(START_S)
    return watched, logged(state_dir), code


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--agents", type=int, default=256)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        return asyncio.run(play(args.play, args.agents))
    with tempfile.TemporaryDirectory() as folder:
        make_project(Path(folder), args.agents, args.processes)
        watched, errors, code = asyncio.run(soak(Path(folder), args))
    memory = watched.figures()
    table(("MB", "a quarter", "end", "MB/min"), {name: list(row.values()) for name, row in memory.items()})
    stored = median(mb for _, mb in watched.store_mb[-5:])
    rows = {"rollouts ended": watched.ended, "in flight (median)": median(watched.in_flight), "store MB": stored}
    table(("", "count"), {**{name: [count] for name, count in rows.items()}, **{n: [c] for n, c in errors.items()}})
    table(("failed rollouts", "count"), {name: [count] for name, count in watched.failed.items()})
    table(("calls", "count"), {name: [count] for name, count in watched.calls.items()})
    grown = max(row["end_mb"] - row["quarter_mb"] * (1 + GROWN_SHARE) for row in memory.values())
    tracebacks = sum(count for name, count in errors.items() if "Traceback" in name)
    unexplained = watched.failed["no reason"] + watched.calls.get("calls.untrainable", 0) + tracebacks
    allowed = KEPT + watched.per_prune
    limits = {
        "grown_beyond_a_tenth_mb": (GROWN_MB, grown <= GROWN_MB),
        "errors_without_a_reason": (0, unexplained == 0),
        "finished_rollouts_kept": (allowed, max(watched.kept) <= allowed),
        "exit_code_when_stopped": (130, code == 130),
    }
    result = {
        "seconds": args.seconds,
        "agents": args.agents,
        "processes": args.processes,
        "memory": memory,
        "ended": watched.ended,
        "in_flight": median(watched.in_flight),
        "store_mb": stored,
        "kept": max(watched.kept),
        "failed": dict(watched.failed),
        "calls": watched.calls,
        "errors": dict(errors),
    }
    emit("soak", result, limits)


if __name__ == "__main__":
    main()
