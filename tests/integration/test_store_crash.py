"""kill -9 at any moment: whatever the store acknowledged is there, whole."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from agl_runtime.calls import unpack
from agl_runtime.store.sqlite import open_store
from fakes.recorded import record

TASKS = 8
TESTS = Path(__file__).parents[1]


def acknowledged(path: Path, lines: int) -> dict[str, set[str]]:
    """Run the writer, kill it after so many acknowledgements, and sort all that it gave by what they say."""
    found: dict[str, set[str]] = {"begun": set(), "committed": set()}
    command = [sys.executable, "-m", "fakes.store_writer", str(path), str(TASKS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS) as writer:
        assert writer.stdout is not None
        for count, line in enumerate(writer.stdout):
            if line.endswith("\n"):  # else it was cut by the kill
                what, call_id = line.split()
                found[what].add(call_id)
            if count == lines:
                writer.kill()
    assert writer.returncode == -9
    return found


@pytest.mark.parametrize("seed", range(4))
async def test_every_acknowledged_call_survives_kill_9(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "store.sqlite3"
    known = acknowledged(path, random.Random(seed).randrange(1, 400))
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    db.close()
    store = open_store(path)
    committed: set[str] = set()
    incomplete: set[str] = set()
    for task in range(TASKS):
        name = f"r{task}"
        _, packed, open_ids = await store.packed_calls(name)
        whole = {call.info.call_id: call for call in unpack(packed)}
        for stored in await store.calls(name):
            turn = int(stored.info.call_id.split("-")[1])
            assert stored.request["messages"] == [f"{name} message {i}" for i in range(turn + 1)]
        for call_id, call in whole.items():
            turn = int(call_id.split("-")[1])
            ids = [task, *range(100 * turn)]
            assert (call.prompt_ids.tolist(), call.sampled_ids.tolist()) == (
                ids,
                list(range(100 * turn, 100 * turn + 50)),
            )
            assert call.logprobs.tolist() == [-0.5] * 50
        committed |= set(whole)
        incomplete |= set(open_ids)
        await record(store, f"{name}-after", [task, *range(40)], (1,), rollout_id=name)
    await store.close()
    assert known["committed"] <= committed
    assert known["begun"] <= committed | incomplete
    assert len(incomplete) <= TASKS, "each task has one call under way at most"
