"""`agl demo` on several seeds: pass@1 on the held-out tasks before and after, time, and what the agents cost of it.

Prints a table, the checkpoints at other temperatures (see demo_policy.py), then one JSON object. The agents' share is
theirs of all CPU seconds that the run used. The time is that of an idle machine only where nothing else runs.

    python benchmarks/bench_demo_seeds.py [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from demo_policy import EXAMPLE, table

LEAST_AFTER = 0.85
MOST_TRAIN_S = 360.0
COLUMNS = ("seed", "before", "after", "steps", "train_seconds", "seconds", "agent_cpu_share")


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def demo(folder: Path, seed: int) -> dict[str, Any]:
    """Run `agl demo`; its own figures and the agents' share."""
    began = children_cpu_s()
    command = [sys.executable, "-m", "agl_cli.main", "demo", str(folder), "--seed", str(seed), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row = json.loads(done.stdout.splitlines()[-1])
    used_s = children_cpu_s() - began
    return {**row, "cpu_s": round(used_s, 1), "agent_cpu_share": round(row["agent_cpu_s_total"] / used_s, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [demo(Path(folder) / f"seed{seed}", seed) for seed in args.seeds]
        print("".join(f"{name:>16}" for name in COLUMNS))
        for row in rows:
            print("".join(f"{row[name]:>16.3f}" if row[name] % 1 else f"{row[name]:>16}" for name in COLUMNS))
        by_policy = table([EXAMPLE / "policy", *(Path(row["checkpoint"]) for row in rows)], args.samples)
    good = all(row["after"] >= LEAST_AFTER and row["train_seconds"] <= MOST_TRAIN_S for row in rows)
    bounds = {"least_after": LEAST_AFTER, "most_train_s": MOST_TRAIN_S, "within_limit": good}
    temperatures = dict(zip(["before", *args.seeds], by_policy.values(), strict=True))
    result = {"benchmark": "demo_seeds", "cores": os.cpu_count(), "seeds": rows, "temperatures": temperatures, **bounds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
