"""What running an agent costs beside the agent: with each kind of isolation, a Python script that does nothing.

`start` is one run of the process runner alone; CPU is that of the runner's children. Then 100 rollouts through a real
gateway and its store, with a reward function, at the concurrency that is the default here; CPU is that of the gateway,
the controller, the agents and the reward functions together.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from agl_runtime.client import GatewayClient
from agl_runtime.config import load_project
from agl_runtime.controller.runners.isolation import Isolation, Kind, probe_isolation
from agl_runtime.controller.runners.process import ProcessRunner
from agl_runtime.part import admin_key, gateway_url
from agl_runtime.schemas import Grant, Rollout, RolloutConfig, RolloutCreate, RolloutStatus

STARTS = 40
ROLLOUTS = 100
KINDS: tuple[Kind, ...] = ("none", "unshare", "bubblewrap")


def make(root: Path, kind: Kind) -> None:
    settings = {
        "agent": {"command": [sys.executable, "-I", "agent.py"], "isolation": "off" if kind == "none" else "required"},
        "reward": {"function": "reward.py:reward", "python": sys.executable},
    }
    (root / "agl.yaml").write_text(json.dumps(settings))
    (root / "agent.py").write_text("")
    (root / "reward.py").write_text("def reward(exit):\n    return exit.code == 0\n")


async def starts(root: Path, isolation: Isolation) -> tuple[float, float]:
    """Milliseconds a run: wall and CPU."""
    runner = ProcessRunner(load_project(root), "http://127.0.0.1:9", isolation)
    runner.clean_up()
    status = RolloutStatus(created_at=0.0, updated_at=0.0)
    began, cpu = time.perf_counter(), cpu_s()
    for number in range(STARTS):
        rollout = Rollout(rollout_id=f"r{number}", input={}, config=RolloutConfig(), status=status)
        run = await runner.run(Grant(rollout=rollout, attempt_id="0", agent_key="k"), asyncio.Event())
        if not run.exit.ok:
            raise SystemExit(run.stderr.text)
    return (time.perf_counter() - began) * 1000 / STARTS, (cpu_s() - cpu) * 1000 / STARTS


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def parts_cpu_s(pid: int) -> float:
    return sum(psutil.Process(pid).cpu_times()[:4])


async def rollouts(root: Path) -> tuple[float, float]:
    """Rollouts a second, and milliseconds of CPU a rollout."""
    argv = [sys.executable, "-m"]
    parts = [
        subprocess.Popen([*argv, f"agl_runtime.{name}", "--root", str(root)], stderr=subprocess.DEVNULL)
        for name in ("gateway", "controller")
    ]
    try:
        while not (root / ".agl/run/gateway.json").exists():
            await asyncio.sleep(0.05)
        async with GatewayClient(gateway_url(root / ".agl"), admin_key(root / ".agl")) as client:
            while not any(part.part == "controller" for part in await client.parts()):
                await asyncio.sleep(0.05)
            began, before = time.perf_counter(), sum(parts_cpu_s(part.pid) for part in parts)
            await client.add_rollouts([RolloutCreate(input={}) for _ in range(ROLLOUTS)])
            while (await client.terminal(0, wait_s=20)).total_terminal < ROLLOUTS:
                await asyncio.sleep(0.01)
            used = sum(parts_cpu_s(part.pid) for part in parts) - before
            return ROLLOUTS / (time.perf_counter() - began), used * 1000 / ROLLOUTS
    finally:
        for part in reversed(parts):
            part.terminate()
            part.wait()


def main() -> None:
    for kind in KINDS:
        isolation = Isolation("none") if kind == "none" else probe_isolation((kind,))
        if kind != isolation.kind:
            print(f"{kind:12} not to be had here: {isolation.reason}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), kind)
            wall_ms, cpu_ms = asyncio.run(starts(Path(folder), isolation))
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), kind)
            per_s, each_ms = asyncio.run(rollouts(Path(folder)))
        start = f"start {wall_ms:6.1f} ms wall, {cpu_ms:5.1f} ms CPU"
        print(f"{kind:12} {start}; {per_s:5.1f} rollouts/s, {each_ms:5.1f} ms CPU each")


if __name__ == "__main__":
    main()
