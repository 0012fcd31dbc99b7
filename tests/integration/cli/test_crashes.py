"""A whole run under kill -9 at random moments; `benchmarks/bench_crash.py` does the same with many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.crashes import EVERYTHING, crash_run
from fakes.tiny_model import make_tiny_policy

TARGETS = [("gateway",), ("trainer",), ("controller", "trainer"), ("agents",), EVERYTHING]


@pytest.mark.parametrize("seed", [0])
async def test_nothing_is_lost_or_trained_twice_by_kill_9_of_parts_alone_and_together(
    tmp_path: Path, seed: int
) -> None:
    policy = make_tiny_policy(tmp_path / "policy")
    with crash_run(tmp_path / "project", policy, seed) as run:
        for targets in TARGETS:
            run.crash(targets, longest_s=1.0, early=0.0)
        summary = run.finish()
        faults, counts = await run.evidence.faults(run.state_dir)
    assert faults == []
    assert summary["ended"] == "complete"
    assert counts["updates"] * 4 <= counts["trained"] <= summary["steps"] * 4  # a step may be skipped, with its reason
    assert counts["answers_seen"] > 0
