"""What is remembered and what is written of an attempt's calls, over many turns, restarts and shortages of memory."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_runtime.calls import Ids, common_prefix, unpack
from agl_runtime.errors import ConflictError, StoreError
from agl_runtime.schemas import RolloutCreate
from agl_runtime.store import codec, database, open_attempts
from agl_runtime.store.open_attempts import MOST_ENDS, MOST_OUTLINES, OpenAttempt, OpenAttempts
from agl_runtime.store.sqlite import SqliteStore, open_store
from fakes.recorded import commit, intent, record

TOOLS = [{"type": "function", "function": {"name": f"tool{i}", "description": "d" * 300}} for i in range(10)]


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"{rng.randrange(10_000):04}" for _ in range(count))


async def size_after(path: Path, turns: int) -> int:
    """Bytes of a store with one conversation of so many turns, 300 observed and 200 sampled tokens each."""
    rng = random.Random(0)
    store = open_store(path)
    await store.add_rollouts([RolloutCreate(rollout_id="r", input={})])
    ids: list[int] = []
    messages: list[Any] = []
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": words(rng, 300)}]
        prompt = [*ids, *(rng.randrange(50_000) for _ in range(300))]
        sampled = [rng.randrange(50_000) for _ in range(200)]
        reply = {"role": "assistant", "content": words(rng, 200)}
        request = {"model": "policy", "messages": messages, "tools": TOOLS, "seed": turn}
        await store.begin_call(intent(str(turn), request=request))
        await store.commit_call(commit(str(turn), prompt, sampled, response={"choices": [{"message": reply}]}))
        ids, messages = [*prompt, *sampled], [*messages, reply]
    calls = await store.calls("r")
    assert calls[-1].request["messages"] == messages[:-1]
    await store.close()
    return path.stat().st_size


async def test_a_trajectory_costs_about_its_own_length(tmp_path: Path) -> None:
    empty, fifty, hundred = [await size_after(tmp_path / f"{turns}", turns) for turns in (1, 50, 100)]
    assert hundred - fifty < 1.15 * (fifty - empty)
    assert hundred < 4_000_000


async def test_deleting_a_rollout_leaves_nothing_of_it(tmp_path: Path) -> None:
    await size_after(tmp_path / "s", 3)
    store = open_store(tmp_path / "s")
    await store.add_event("r", "0", "log", {"text": "x" * 2000})
    await store.delete_rollout("r")
    await store.close()
    db = sqlite3.connect(tmp_path / "s")
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    left = {table: db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables}
    db.close()
    assert {table for table, count in left.items() if count} == {"counters", "sqlite_sequence"}


branches = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.integers(0, 4)), min_size=1, max_size=14)


@settings(deadline=None, max_examples=20)
@given(branches, st.sets(st.integers(0, 13)), st.sampled_from([0, 10**9]))
def test_any_forest_of_calls_comes_back_whole(
    turns: list[tuple[int, int, int]], restarts: set[int], budget_bytes: int
) -> None:
    """Each turn continues some earlier call, cut anywhere; the store is closed and opened again in between."""

    async def scenario(path: Path) -> None:
        store = SqliteStore(path, budget_bytes=budget_bytes)
        await store.open()
        await store.add_rollouts([RolloutCreate(rollout_id=name, input={}) for name in "rs"])
        told: list[tuple[list[int], list[int]]] = []
        for turn, (parent, cut, count) in enumerate(turns):
            if turn in restarts:
                await store.close()
                await store.open()
            prompt, sampled = told[-1 - parent] if parent < len(told) else ([7] * 20, [8])
            whole = [*prompt, *sampled]
            now = ([*whole[: cut or None], turn], [100 + turn] * count)
            told.append(now)
            await asyncio.gather(
                *(record(store, f"{name}{turn}", *now, messages=now[0], rollout_id=name) for name in "rs")
            )
        _, packed, _ = await store.packed_calls("r")
        got = [(call.prompt_ids.tolist(), call.sampled_ids.tolist()) for call in unpack(packed)]
        requests = [call.request["messages"] for call in await store.calls("r")]
        await store.close()
        assert got == told
        assert requests == [prompt for prompt, _ in told]

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder) / "s.sqlite3"))


async def test_after_a_restart_a_call_builds_on_what_is_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite3"
    store = open_store(path)
    await store.add_rollouts([RolloutCreate(rollout_id="r", input={})])
    await record(store, "a", range(100), (1,), messages=["m"] * 50)
    await store.close()
    store = open_store(path)
    await record(store, "b", [*range(100), 1, 2], (3,), messages=["m"] * 51)
    _, packed, _ = await store.packed_calls("r")
    await store.close()
    assert (packed[1].prompt.base_id, packed[1].prompt.keep) == ("a", 101)
    db = sqlite3.connect(path)
    assert db.execute("SELECT base_id FROM requests ORDER BY call").fetchall() == [(None,), ("a",)]
    db.close()


@pytest.mark.parametrize("budget_bytes", [0, 10**9])
async def test_only_branch_ends_are_remembered_and_only_within_the_budget(tmp_path: Path, budget_bytes: int) -> None:
    store = open_store(tmp_path / "s.sqlite3")
    await store.add_rollouts([RolloutCreate(rollout_id=name, input={}) for name in "rst"])
    for name in "rst":
        for turn in range(4):
            size = 10 + 2 * turn
            await record(store, f"{name}{turn}", range(size), (size,), messages=["m"] * turn, rollout_id=name)
    await store.close()
    db = sqlite3.connect(tmp_path / "s.sqlite3")
    db.row_factory = sqlite3.Row
    opened = OpenAttempts(budget_bytes)
    numbers = [row["n"] for row in db.execute("SELECT n FROM attempts ORDER BY n")]
    first = opened.get(db, numbers[0])
    assert {name: ids.tolist() for name, ids in first.ends.items()} == {"r3": list(range(17))}
    assert list(first.outlines) == ["r3"]
    for number in numbers[1:]:
        opened.get(db, number)
    assert (opened.get(db, numbers[0]) is first) == bool(budget_bytes)
    db.close()


def test_of_requests_that_share_nothing_the_newest_are_remembered() -> None:
    attempt = OpenAttempt()
    for number in range(MOST_OUTLINES + 5):
        attempt.begin(str(number), codec.encode({"messages": [number]}, {}).outline, None)
    assert list(attempt.outlines) == [str(number) for number in range(5, MOST_OUTLINES + 5)]


def ids(*parts: int) -> Ids:
    return np.array(parts, np.int32)


def test_thousands_of_calls_without_common_ground_cost_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def count(prompt: Ids, end: Ids) -> int:
        nonlocal compared
        compared += 1
        return common_prefix(prompt, end)

    monkeypatch.setattr(open_attempts, "common_prefix", count)
    attempt = OpenAttempt()
    for number in range(3000):
        assert attempt.match(ids(number, 7))[2] == []
        attempt.commit(str(number), ids(number, 7, 8), [])
    assert compared <= 3000 * MOST_ENDS
    assert attempt.size_bytes == MOST_ENDS * ids(0, 7, 8).nbytes


def test_a_conversation_is_continued_however_many_single_questions_come_between() -> None:
    attempt = OpenAttempt()
    attempt.commit("first", ids(1, 2), [])
    attempt.commit("second", ids(1, 2, 3), ["first"])
    for number in range(2 * MOST_ENDS):
        attempt.commit(str(number), ids(100 + number), [])
    assert attempt.match(ids(1, 2, 3, 4)) == ("second", 3, ["second"])


def test_of_conversations_alone_the_newest_are_remembered() -> None:
    attempt = OpenAttempt()
    for number in range(MOST_ENDS + 5):
        attempt.commit(f"{number} first", ids(number), [])
        attempt.commit(f"{number}", ids(number, 1), [f"{number} first"])
    assert list(attempt.ends) == [str(number) for number in range(5, MOST_ENDS + 5)]


async def test_what_a_failed_commit_left_in_memory_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections: list[sqlite3.Connection] = []

    def open_writer(
        path: Path, real: Callable[[Path], sqlite3.Connection] = database.open_writer
    ) -> sqlite3.Connection:
        connections.append(real(path))
        return connections[-1]

    def refuse_to_commit(action: int, verb: str | None, *_: str | None) -> int:
        is_commit = action == sqlite3.SQLITE_TRANSACTION and verb == "COMMIT"
        return sqlite3.SQLITE_DENY if is_commit else sqlite3.SQLITE_OK

    monkeypatch.setattr(database, "open_writer", open_writer)
    store = open_store(tmp_path / "s.sqlite3")
    await store.add_rollouts([RolloutCreate(rollout_id="r", input={})])
    await record(store, "a", range(50), (50,))
    await store.begin_call(intent("b"))
    connections[0].set_authorizer(refuse_to_commit)
    with pytest.raises(StoreError, match="not authorized"):
        await store.commit_call(commit("b", range(60), (60,)))
    connections[0].set_authorizer(None)
    assert (await store.packed_calls("r"))[2] == ["b"]
    await store.commit_call(commit("b", range(60), (60,)))
    await record(store, "c", range(70), (70,))
    _, packed, _ = await store.packed_calls("r")
    await store.close()
    assert [(item.prompt.base_id, item.prompt.keep) for item in packed] == [(None, 0), ("a", 51), ("b", 61)]
    assert [call.prompt_ids.tolist() for call in unpack(packed)] == [list(range(n)) for n in (50, 60, 70)]


async def test_concurrent_tasks_each_record_their_own_attempt(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s.sqlite3")
    names = [f"r{i}" for i in range(16)]
    await store.add_rollouts([RolloutCreate(rollout_id=name, input={}) for name in names])

    async def converse(name: str) -> None:
        ids = list(range(2000))
        for turn in range(5):
            await record(store, f"{name}-{turn}", ids, [turn] * 200, rollout_id=name)
            ids = [*ids, *[turn] * 200, 9]

    await asyncio.gather(*map(converse, names))
    for name in names:
        _, packed, incomplete = await store.packed_calls(name)
        assert [call.prompt_ids.size for call in unpack(packed)] == [2000, 2201, 2402, 2603, 2804]
        assert np.concatenate([item.prompt.tail for item in packed]).size == 2004
        assert incomplete == []
    await store.close()


async def test_what_a_failed_transaction_did_not_touch_stays_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "s.sqlite3")
    await store.add_rollouts([RolloutCreate(rollout_id=name, input={}) for name in "rs"])
    for name in "rs":
        await record(store, name, range(5), (1,), rollout_id=name)
    loaded: list[int] = []
    load = open_attempts._load
    monkeypatch.setattr(open_attempts, "_load", lambda db, attempt: loaded.append(attempt) or load(db, attempt))
    with pytest.raises(ConflictError):
        await store.begin_call(intent("r", rollout_id="r"))  # known already
    other = sqlite3.connect(tmp_path / "s.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting = asyncio.ensure_future(store.mark_delivered("r"))
    await asyncio.sleep(0.01)
    other.close()
    await waiting
    for name in "rs":
        await record(store, f"{name}2", range(5), (1,), rollout_id=name)
    await store.close()
    assert loaded == [1], "by the job that failed, done again apart"
