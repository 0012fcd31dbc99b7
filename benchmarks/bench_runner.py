"""How fast agents come and go: 100 rollouts of a Python script that does nothing, here and in Agent Lightning 1.0.2.

Both sides run as they ship, gateway and controller in processes of their own; 1.0.2 also with the shortest interval
between its polls that makes sense. agl runs with isolation as `auto` finds it and without. The clock starts when the
controller begins, with the rollouts waiting, and stops when the last has ended.

    python benchmarks/bench_runner.py [--rollouts 100]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import venv
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.pace import Pace, timed
from support.report import emit, table
from support.servers import KEY, agl_gateway, reference_python, reference_server

LEAST_RATIO = 15.0
POLLS_S = {"as it ships (10 s)": None, "polls every 0.2 s": 0.2}
ISOLATIONS = ("auto", "off")


def agl(rollouts: int, isolation: str) -> Pace:
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as name, tempfile.TemporaryDirectory() as tools:
        folder = Path(name)
        (folder / "agent.py").write_text("", encoding="utf-8")
        agent: dict[str, Any] = {"command": [plain_python(Path(tools)), "agent.py"], "isolation": isolation}
        with agl_gateway(folder, {"agent": agent}) as server:
            server.add_rollouts(rollouts)
            command = [sys.executable, "-m", "agl_runtime.controller", "--root", str(folder)]
            return timed(server, command, folder, "agents at once", rollouts)


def reference(rollouts: int, poll_s: float | None) -> Pace:
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as name, reference_server(Path(name)) as server:
        folder = Path(name)
        (folder / "nothing.py").write_text("class Agent:\n    def run(self):\n        pass\n", encoding="utf-8")
        server.add_rollouts(rollouts, config={"local": {"agent_class": "nothing:Agent"}})
        options = ["runner_type=local", f"agl_server.url={server.url}", f"agl_server.key={KEY}"]
        if poll_s is not None:
            options.append(f"local_runner.poll_interval={poll_s}")
        command = [str(reference_python()), "-m", "agentlightning.controller", *options]
        return timed(server, command, folder, "LocalReconciler starting", rollouts)


def plain_python(folder: Path) -> str:
    """An interpreter without packages, in an environment of its own: what start-up code others have installed into
    this one is no part of a script that does nothing."""
    venv.create(folder / "python", symlinks=True)
    return str(folder / "python" / "bin" / "python")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=100)
    count = parser.parse_args().rollouts
    theirs = {name: reference(count, poll_s) for name, poll_s in POLLS_S.items()}
    ours = {name: agl(count, name) for name in ISOLATIONS}
    named = {f"agentlightning 1.0.2, {name}": pace for name, pace in theirs.items()}
    named |= {f"agl, isolation {name}": pace for name, pace in ours.items()}
    rows = {name: (pace.per_s, pace.cpu_ms) for name, pace in named.items()}
    table(["a script that does nothing", "rollouts/s", "CPU ms each"], rows)
    shipped, fastest = next(iter(theirs.values())).per_s, max(pace.per_s for pace in theirs.values())
    ratios = {name: pace.per_s / shipped for name, pace in ours.items()}
    result = {"rollouts": count, **{name: asdict(pace) for name, pace in named.items()}, "ratio_to_shipped": ratios}
    result |= {"ratio_to_fastest": {name: pace.per_s / fastest for name, pace in ours.items()}}
    emit("runner", result, {"ratio": (LEAST_RATIO, min(ratios.values()) >= LEAST_RATIO)})


if __name__ == "__main__":
    main()
