"""Grouped transactions: what one job does to its neighbours, and what a full disk does to all."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from agl_runtime.errors import ConflictError, StoreError
from agl_runtime.store import database, worker
from agl_runtime.store.worker import Worker


class Bench:
    """A worker that can be kept busy, so that what is submitted meanwhile forms one transaction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.db = database.open_writer(path)
        self.db.execute("CREATE TABLE t (x BLOB)")
        self.commits = 0
        self.undone = 0
        self.db.set_trace_callback(self._count)
        self.worker = Worker(self.db, path, "BEGIN IMMEDIATE", 100, on_undo=self._undo)

    def _count(self, statement: str) -> None:
        self.commits += statement == "COMMIT"

    def _undo(self) -> None:
        self.undone += 1

    async def busy(self) -> tuple[threading.Event, asyncio.Future[bool]]:
        """Occupy the worker until the event is set."""
        started, go_on = threading.Event(), threading.Event()
        job = asyncio.ensure_future(self.worker.run(lambda db: started.set() or go_on.wait(30)))
        assert await asyncio.to_thread(started.wait, 30)
        return go_on, job

    async def together(self, *jobs: Callable[[sqlite3.Connection], object], are_short: bool = False) -> list[object]:
        go_on, first = await self.busy()
        rest = [asyncio.ensure_future(self.worker.run(job, is_short=are_short)) for job in jobs]
        await asyncio.sleep(0)  # one step of the loop submits them all
        go_on.set()
        await first
        return await asyncio.gather(*rest, return_exceptions=True)

    def rows(self) -> list[int]:
        reader = database.open_reader(self.path)
        sizes = [row[0] for row in reader.execute("SELECT length(x) FROM t ORDER BY rowid")]
        reader.close()
        return sizes


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "s.sqlite3")
    yield made
    await made.worker.stop()


def put(size_bytes: int) -> Callable[[sqlite3.Connection], int]:
    def work(db: sqlite3.Connection) -> int:
        db.execute("INSERT INTO t VALUES (zeroblob(?))", (size_bytes,))
        return size_bytes

    return work


def put_then_fail(error: Exception) -> Callable[[sqlite3.Connection], int]:
    def work(db: sqlite3.Connection) -> int:
        put(99)(db)
        raise error

    return work


@pytest.mark.parametrize("are_short", [False, True])
async def test_jobs_that_wait_together_share_a_commit(bench: Bench, are_short: bool) -> None:
    before = bench.commits
    assert await bench.together(*(put(i) for i in range(50)), are_short=are_short) == list(range(50))
    assert bench.commits - before == 2, "one for the job that kept the worker busy, one for all others"
    assert bench.rows() == list(range(50))


async def test_the_loop_is_woken_once_for_a_transaction(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, wakes = asyncio.get_running_loop(), []
    go_on, first = await bench.busy()
    rest = [asyncio.ensure_future(bench.worker.run(put(i))) for i in range(50)]
    await asyncio.sleep(0)  # one step of the loop submits them all
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *work: wakes.append(work) or wake(*work))
    go_on.set()
    assert await asyncio.gather(first, *rest) == [True, *range(50)]
    assert len(wakes) == 2, "one for the job that kept the worker busy, one for all others"


async def test_short_jobs_are_done_in_the_loop_and_others_in_a_thread(bench: Bench) -> None:
    here = threading.get_ident()
    assert await bench.worker.run(lambda _: threading.get_ident(), is_short=True) == here
    assert await bench.worker.run(lambda _: threading.get_ident()) != here


async def test_a_long_log_is_copied_in_a_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "ROWS_PER_COPY", 3)
    copied_in: list[int] = []
    copy = database.copy_log
    monkeypatch.setattr(database, "copy_log", lambda db: copied_in.append(threading.get_ident()) or copy(db))
    for _ in range(7):
        await bench.worker.run(put(1), is_short=True)
    assert len(copied_in) == 2
    assert threading.get_ident() not in copied_in
    assert bench.rows() == [1] * 7


async def test_a_result_is_given_out_only_after_the_commit(bench: Bench) -> None:
    committing, go_on = threading.Event(), threading.Event()

    def hold_the_commit(statement: str) -> None:
        if statement == "COMMIT":
            committing.set()
            go_on.wait(30)

    bench.db.set_trace_callback(hold_the_commit)
    job = asyncio.ensure_future(bench.worker.run(put(1)))
    assert await asyncio.to_thread(committing.wait, 30)
    await asyncio.sleep(0)  # one step of the loop: a result given out by now would have arrived
    assert not job.done()
    go_on.set()
    assert await job == 1


@pytest.mark.parametrize("are_short", [False, True])
async def test_a_job_that_fails_takes_nothing_of_its_neighbours_back(bench: Bench, are_short: bool) -> None:
    refused, broken = ConflictError("no"), RuntimeError("a fault of the code")
    jobs = put(1), put_then_fail(refused), put(2), put_then_fail(broken), put(3)
    outcomes = await bench.together(*jobs, are_short=are_short)
    assert outcomes == [1, refused, 2, broken, 3]
    assert bench.rows() == [1, 2, 3]


async def test_an_error_of_sqlite_becomes_a_store_error(bench: Bench) -> None:
    (outcome,) = await bench.together(lambda db: db.execute("SELECT * FROM missing"))
    assert isinstance(outcome, StoreError)
    assert str(outcome) == f"The store {bench.path} failed (no such table: missing). Look at `agl logs gateway`."


@pytest.mark.parametrize("are_short", [False, True])
async def test_what_does_not_fit_on_the_disk_fails_alone(bench: Bench, are_short: bool) -> None:
    await bench.worker.run(lambda db: db.execute("PRAGMA max_page_count = 100").fetchone())
    outcomes = await bench.together(put(10), put(10_000_000), put(20), are_short=are_short)
    assert outcomes[0] == 10
    assert isinstance(outcomes[1], StoreError)
    assert str(outcomes[1]) == (
        f"The disk that holds the store {bench.path} is full (database or disk is full)."
        " Free some space; nothing recorded is lost."
    )
    assert outcomes[2] == 20
    assert bench.rows() == [10, 20]
    await bench.worker.run(lambda db: db.execute("PRAGMA max_page_count = 100000").fetchone())
    assert await bench.worker.run(put(10_000_000)) == 10_000_000


async def test_a_transaction_given_up_is_done_again_job_by_job(bench: Bench) -> None:
    def lose_the_transaction_once(db: sqlite3.Connection) -> str:
        if not bench.undone:
            db.execute("ROLLBACK")
            raise sqlite3.OperationalError("the disk failed for a moment")
        return "done"

    assert await bench.together(put(1), lose_the_transaction_once, put(2)) == [1, "done", 2]
    assert (bench.rows(), bench.undone) == ([1, 2], 1)


async def test_a_file_locked_from_outside_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.0)
    bench = Bench(tmp_path / "s.sqlite3")
    other = sqlite3.connect(bench.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"Another program has the store .* locked \(database is locked\)"):
        await bench.worker.run(put(1))
    other.close()
    assert await bench.worker.run(put(1)) == 1
    await bench.worker.stop()


@pytest.mark.parametrize("is_short", [False, True])
async def test_a_file_that_is_locked_for_a_while_is_waited_for_and_the_loop_goes_on(
    tmp_path: Path, is_short: bool
) -> None:
    bench, beginning = Bench(tmp_path / "s.sqlite3"), threading.Event()
    other = sqlite3.connect(bench.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    here = threading.get_ident()
    bench.db.set_trace_callback(
        lambda statement: statement == "BEGIN IMMEDIATE" and threading.get_ident() != here and beginning.set()
    )
    job = asyncio.ensure_future(bench.worker.run(put(1), is_short=is_short))
    assert await asyncio.to_thread(beginning.wait, 30)
    other.execute("ROLLBACK")
    assert await job == 1
    other.close()
    await bench.worker.stop()


async def test_stopping_finishes_what_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "s.sqlite3")
    jobs = [asyncio.ensure_future(bench.worker.run(put(i))) for i in range(5)]
    await asyncio.sleep(0)  # one step of the loop submits them all
    await bench.worker.stop()
    assert await asyncio.gather(*jobs) == [0, 1, 2, 3, 4]
    assert bench.rows() == [0, 1, 2, 3, 4]


async def test_a_caller_cancelled_while_it_waits_withdraws_its_job(bench: Bench) -> None:
    go_on, busy = await bench.busy()
    waiting = asyncio.ensure_future(bench.worker.run(put(1)))
    await asyncio.sleep(0)  # one step of the loop submits it
    waiting.cancel()
    await asyncio.wait([waiting])
    go_on.set()
    await busy
    assert await bench.worker.run(put(2)) == 2
    assert bench.rows() == [2]


async def test_a_disk_that_fails_even_in_taking_back_fails_its_jobs_and_no_later_ones(bench: Bench) -> None:
    failing = ["COMMIT", "ROLLBACK"]

    def judge(action: int, what: str | None, *_: object) -> int:
        if action != sqlite3.SQLITE_TRANSACTION or what not in failing:
            return sqlite3.SQLITE_OK
        failing.remove(what)
        return sqlite3.SQLITE_DENY

    bench.db.set_authorizer(judge)
    async with asyncio.timeout(30):
        for _ in range(2):
            with pytest.raises(StoreError):
                await bench.worker.run(lambda db: db.execute("INSERT INTO t VALUES ('lost')"))
        await bench.worker.run(lambda db: db.execute("INSERT INTO t VALUES ('kept')"))
    assert (bench.rows(), failing) == ([4], [])
