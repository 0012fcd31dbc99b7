"""Warm starts against cold ones: 64 agents that import openai and make one call each, through gateway and controller.

Both run with the isolation that `auto` finds, and the model answers at once. The clock starts when the controller
begins, with the rollouts waiting, so the warm side's one import of openai is in its time.

    python benchmarks/bench_warm.py [--agents 64]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from support.conversation import MODEL, Shape
from support.pace import Pace, timed
from support.report import emit, table
from support.servers import agl_gateway, model_stub

LEAST_RATIO = 6.0
MODULES = ["openai", "openai.resources.chat.completions", "httpcore2"]
AGENT = f"""
from openai import OpenAI

messages = [{{"role": "user", "content": "agl:000000000000:000"}}]
answer = OpenAI().chat.completions.create(model="{MODEL}", messages=messages)
print(answer.choices[0].message.content)
"""


def run(agents: int, *, warm: bool) -> Pace:
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as name, model_stub(Shape(1, 20, 20, 0)) as stub:
        folder = Path(name)
        (folder / "agent.py").write_text(AGENT, encoding="utf-8")
        agent = {"command": [sys.executable, "agent.py"], "warm": MODULES if warm else False}
        with agl_gateway(folder, {"agent": agent}) as server:
            server.register(stub)
            server.add_rollouts(agents)
            command = [sys.executable, "-m", "agl_runtime.controller", "--root", str(folder)]
            return timed(server, command, folder, "agents at once", agents)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--agents", type=int, default=64)
    count = parser.parse_args().agents
    paces = {name: run(count, warm=name == "warm") for name in ("cold", "warm")}
    table(
        ["one call with openai", "agents/s", "seconds", "CPU ms each"],
        {name: (pace.per_s, count / pace.per_s, pace.cpu_ms) for name, pace in paces.items()},
    )
    ratio = paces["warm"].per_s / paces["cold"].per_s
    result = {"agents": count, **{name: asdict(pace) for name, pace in paces.items()}, "ratio": ratio}
    emit("warm", result, {"ratio": (LEAST_RATIO, ratio >= LEAST_RATIO)})


if __name__ == "__main__":
    main()
