"""The example trained by real verl on the CPU, synchronously and asynchronously: what it learns, and where a step goes.

Each run is `agl up` with gateway, controller, agents and verl, as a user starts it. Of a step's time `rollout` is until
the batch is there, `log-probs` their recomputation, `update` the optimizer's steps, `sync` the new weights' way into
the serving engine, `save` the checkpoint; calls are held in all but the first. The device is idle while no call is at
the serving engine and no batch is trained on: the gateway and the trainer's state are looked at 20 times a second. What
is measured is verl on a CPU, with a policy of 0.2 million parameters: its own cost a step is large beside the work.

    python benchmarks/bench_verl.py [--updates 12] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from support import report

from agl_runtime.client import GatewayClient
from agl_runtime.errors import AglError
from agl_runtime.part import KEY_FILE, gateway_url

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from fakes.verl_run import VerlRun

LEARNT = 0.6
GAP = 1e-4
LOOK_EVERY_S = 0.05
SPLIT = {
    "rollout": "timing_s/gen",
    "log-probs": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "sync": "timing_s/update_weights",
    "save": "timing_s/save_checkpoint",
    "step": "timing_s/step",
}
MODES = {"synchronous": {}, "asynchronous": {"active_groups": 8}}


class Watch:
    """Counts looks at a running project in which its device worked, and all of them."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._done = threading.Event()
        self.looks = 0
        self.busy = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=lambda: asyncio.run(self._watch()))
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    async def _watch(self) -> None:
        while not self._done.is_set():
            with contextlib.suppress(AglError, OSError):  # the gateway is not there yet, or no more
                key = (self._state_dir / KEY_FILE).read_text().strip()
                async with GatewayClient(gateway_url(self._state_dir), key, patience_s=0) as client:
                    while not self._done.is_set():
                        await self._look(client)
                        await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self, client: GatewayClient) -> None:
        state = next((part.state for part in await client.parts() if part.part == "trainer"), None)
        if state in ("sampling", "updating"):
            self.looks += 1
            self.busy += state == "updating" or (await client.proxy_state()).inflight > 0


def measure(folder: Path, mode: str, updates: int, seed: int) -> dict[str, Any]:
    run = VerlRun(folder / mode, {"steps": updates, "seed": seed, **MODES[mode]})
    watch = Watch(run.root / ".agl")
    began = time.monotonic()
    with watch.watching():
        code = run.up()
    if code:
        raise SystemExit(f"{mode}: agl up ended with {code}.\n{run.said[-2000:]}")
    summary, steps = run.summary, run.steps()
    files = (run.root / ".agl" / "verl").glob("*/figures-*.jsonl")
    lines = [json.loads(line)["data"] for file in files for line in file.read_text().splitlines()]
    logged = [data for data in lines if SPLIT["step"] in data][1:]  # the first step also warms up
    return {
        "before": summary["before"]["pass_at_1"],
        "after": summary["after"]["pass_at_1"],
        "seconds": time.monotonic() - began,
        "logprob_gap": max(step["logprob_gap"] or 0.0 for step in steps),
        "staleness": fmean(step["staleness_mean"] for step in steps),
        "split_s": {name: fmean(data.get(theirs, 0.0) for data in logged) for name, theirs in SPLIT.items()},
        "idle_share": 1 - watch.busy / watch.looks,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {mode: measure(Path(folder), mode, args.updates, args.seed) for mode in MODES}
    report.table(
        ["mode", "pass@1 before", "after", "seconds", "staleness", "device idle"],
        {
            mode: [run["before"], run["after"], run["seconds"], run["staleness"], run["idle_share"]]
            for mode, run in found.items()
        },
    )
    report.table(["seconds of a step", *SPLIT], {mode: list(run["split_s"].values()) for mode, run in found.items()})
    learnt = min(run["after"] for run in found.values())
    gap = max(run["logprob_gap"] for run in found.values())
    report.emit("verl", found, {"pass_at_1": (LEARNT, learnt > LEARNT), "logprob_gap": (GAP, gap < GAP)})
    return 0 if learnt > LEARNT and gap < GAP else 1


if __name__ == "__main__":
    sys.exit(main())
