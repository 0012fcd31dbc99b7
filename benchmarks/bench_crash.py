"""kill -9 at random moments of a real training run, and what its store proves afterwards.

One run of `agl up`: the tiny policy, the embedded trainer, agent processes of the standard library. At each of the
moments (seeded) one part, a pair, the supervisor, agents or everything at once is killed; a dead part is started again
by its supervisor, a dead run by the same command. Agents tell an observer of every answer that they saw, and the
observer reads in the store what is committed meanwhile. At the end the run is stopped, resumed and completed, and:

    lost rollouts    every rollout that was ever enqueued has ended, with a reward or a reason
    lost calls       every call that was ever seen committed is there, and every answer that an agent saw, word for word
    trained twice    what the checkpoints of the lineage consumed is disjoint, and each update follows the one before
    versions         no run epoch, and so no policy version, was given out twice

Isolation alternates between two runs: with namespaces agents die with their controller, without they outlive it. Prints
a table, then one JSON object. Ends within the limit of time, with fewer kills if need be, and then says so.

    python benchmarks/bench_crash.py [--kills 50] [--seed 0] [--limit-s 1500]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Literal

from support.report import emit, table

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from fakes.crashes import TARGETS, crash_run
from fakes.tiny_model import make_tiny_policy

LONGEST_WAIT_S = 4.0
Isolation = Literal["auto", "off"]


def crash(folder: Path, isolation: Isolation, kills: int, seed: int, give_up_at: float) -> dict[str, Any]:
    rng = random.Random(seed)
    with crash_run(folder / isolation, folder / "policy", seed, isolation) as run:
        for number in range(kills):
            if time.monotonic() > give_up_at:
                break
            targets = TARGETS[number % len(TARGETS)] if number < len(TARGETS) else rng.choice(TARGETS)
            run.crash(targets, LONGEST_WAIT_S)
            print(f"{isolation}: kill {number + 1} of {kills}: {' '.join(targets)}", file=sys.stderr)
        killed = dict(run.kills)
        summary = run.finish()
        faults, counts = asyncio.run(run.evidence.faults(run.state_dir))
    return {
        "kills": sum(killed.values()),
        "killed": killed,
        "starts": run.starts,
        "recovery_s": run.recovery_s,
        **counts,
        "ended": summary["ended"],
        "ended_by": counts["ended"],
        "logprob_gap": summary["logprob_gap_max"],
        "faults": faults,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=1500.0)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_policy(Path(folder) / "policy")
        runs: dict[Isolation, dict[str, Any]] = {}
        for number, (isolation, share) in enumerate((("auto", args.kills - args.kills // 2), ("off", args.kills // 2))):
            give_up_at = began + args.limit_s * (number + 1) / 2
            runs[isolation] = crash(Path(folder), isolation, share, args.seed + number, give_up_at)
    for run in runs.values():
        waits = run.pop("recovery_s")
        run["recovery_median_s"], run["recovery_most_s"] = median(waits), max(waits)
    figures = ("kills", "starts", "rollouts", "calls", "answers_seen", "partly_seen", "further_attempts", "updates")
    rows = [*figures, "trained", "recovery_median_s", "recovery_most_s"]
    table(
        ("agents", *(f"isolation {name}" for name in runs)), {row: [run[row] for run in runs.values()] for row in rows}
    )
    for run in runs.values():
        for fault in run["faults"]:
            print(f"FAULT: {fault}")
    kills, faults = (sum(run["kills"] for run in runs.values()), sum(len(run["faults"]) for run in runs.values()))
    gap = max(run["logprob_gap"] or 0.0 for run in runs.values())
    limits = {"kills": (args.kills, kills >= args.kills), "faults": (0, not faults), "logprob_gap": (1e-4, gap <= 1e-4)}
    emit("crash", {"seed": args.seed, "seconds": time.monotonic() - began, "kills": kills, "runs": runs}, limits)


if __name__ == "__main__":
    main()
