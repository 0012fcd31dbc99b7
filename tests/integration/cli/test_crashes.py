"""A whole run under kill -9 at random moments; `benchmarks/bench_crash.py` does the same with many more."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from agl_runtime.part import STORE_FILE
from agl_runtime.schemas import CheckpointRecord, RolloutCreate, RolloutState, RolloutStatusPatch
from agl_runtime.store.sqlite import open_store
from fakes.crash_evidence import Evidence
from fakes.crashes import EVERYTHING, crash_run
from fakes.recorded import intent, record
from fakes.tiny_model import make_tiny_policy

TARGETS = [("gateway",), ("trainer",), ("controller", "trainer"), ("agents",), EVERYTHING]
NOTHING = hashlib.sha256(b"").hexdigest()


async def test_nothing_is_lost_or_trained_twice_by_kill_9_of_parts_alone_and_together(tmp_path: Path) -> None:
    policy = make_tiny_policy(tmp_path / "policy")
    with crash_run(tmp_path / "project", policy, seed=0) as run:
        for targets in TARGETS:
            run.crash(targets, longest_s=1.0, early=0.0)
        summary = run.finish()
        faults, counts = await run.evidence.faults(run.state_dir)
    assert faults == []
    assert summary["ended"] == "complete"
    assert counts["updates"] * 4 <= counts["trained"] <= summary["steps"] * 4  # a step may be skipped, with its reason
    assert counts["answers_seen"] > 0


def note(answer_id: str, *, whole: bool = True, digest: str = NOTHING, attempt: str = "0") -> dict[str, object]:
    return {"rollout": "r", "attempt": attempt, "id": answer_id, "whole": whole, "digest": digest}


def seen(*notes: dict[str, object], rollouts: tuple[str, ...] = (), committed: tuple[str, ...] = ()) -> Evidence:
    return Evidence(list(notes), set(rollouts), set(committed))


@pytest.mark.parametrize(
    ("evidence", "updates", "epochs", "fault"),
    [
        (seen(note("c1"), note("c1", whole=False), note("never", whole=False)), (1, 2), (1, 2), None),
        (seen(rollouts=("gone",)), (1, 2), (1, 2), "rollout gone is lost"),
        (seen(committed=("gone",)), (1, 2), (1, 2), "call gone was committed and is lost"),
        (seen(note("c9")), (1, 2), (1, 2), "saw answer c9, and the store does not have it"),
        (seen(note("c1", digest="other")), (1, 2), (1, 2), "saw answer c1, and the store does not have it"),
        (seen(note("c9", whole=False, attempt="1")), (1, 2), (1, 2), "saw the beginning of c9, and nothing says so"),
        (seen(), (1, 3), (1, 2), "not one lineage"),
        (seen(), (1, 2, 2), (1, 2), "not one lineage"),
        (seen(), (1, 2), (2, 2), "run epoch 2 followed 2"),
    ],
)
async def test_the_proof_finds_what_is_wrong(
    tmp_path: Path, evidence: Evidence, updates: tuple[int, ...], epochs: tuple[int, ...], fault: str | None
) -> None:
    (tmp_path / "logs").mkdir()
    lines = [f"serving version {epoch}.0 at http://127.0.0.1:9/v1\n" for epoch in epochs]
    (tmp_path / "logs/trainer.log").write_text("".join(lines))
    store = open_store(tmp_path / STORE_FILE)
    await store.add_rollouts([RolloutCreate(input={"q": 1}, rollout_id="r")])
    await record(store, "c1")
    await store.begin_call(intent("c2"))
    await record(store, "c3", attempt_id="1")
    await store.patch_rollout("r", RolloutStatusPatch(state=RolloutState.FAILED, error_message="a reason"))
    for number, count in enumerate(updates):
        trained = ["r"] if not number else []
        checkpoint = CheckpointRecord(run_id="x", version=f"{number}.{count}", step=count, path="", rollout_ids=trained)
        await store.record_checkpoint(checkpoint)
    await store.close()
    faults, _ = await evidence.faults(tmp_path)
    assert faults == [] if fault is None else [fault in found for found in faults] == [True]


async def test_the_proof_finds_rollouts_without_an_end_and_such_that_were_trained_twice(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/trainer.log").touch()
    store = open_store(tmp_path / STORE_FILE)
    await store.add_rollouts(
        [RolloutCreate(input={"q": n}, rollout_id=name) for n, name in enumerate(("open", "mute"))]
    )
    await store.patch_rollout("mute", RolloutStatusPatch(state=RolloutState.FAILED))
    for count in (1, 2):
        checkpoint = CheckpointRecord(run_id="x", version=f"1.{count}", step=count, path="", rollout_ids=["mute"])
        await store.record_checkpoint(checkpoint)
    await store.close()
    faults, _ = await Evidence([]).faults(tmp_path)
    assert sorted(faults) == [
        "mute was trained 2 times",
        "rollout mute has neither a reward nor a reason",
        "rollout open has not ended",
    ]
