"""One SQLite connection, which does the jobs of many concurrent tasks in shared transactions.

Whatever waits when the connection becomes free forms one transaction. A job's result is given out only when its
transaction is committed, and a job that fails takes nothing of its neighbours back.

Short jobs are done in the event loop itself: a commit waits for no disk (see `database`), and a thread would cost more
than they do. All that takes time is done in a thread, which has the connection meanwhile: long jobs, the copying of the
write-ahead log into the file, and every transaction that failed in the loop, for a file that is locked, a full disk, or
one of its jobs. There each job runs in a savepoint of its own, and when SQLite gives the whole transaction up, its jobs
are done again one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agl_runtime.store import database

T = TypeVar("T")
ROWS_PER_COPY = 4_000  # changed since the log was copied; some 24 MB of it, and more where prompts are long


@dataclass(slots=True)
class _Job:
    work: Callable[[sqlite3.Connection], Any]
    done: asyncio.Future[Any]
    is_short: bool
    result: Any = None
    failure: Exception | None = None


class Worker:
    """`begin` opens a transaction for up to `group` jobs; `on_commit` is called after one that was committed, `on_undo`
    after one that was not.

    Owns `db`, the file `path`. All its callers run in one loop.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        path: Path,
        begin: str,
        group: int,
        on_commit: Callable[[], None] = lambda: None,
        on_undo: Callable[[], None] = lambda: None,
    ) -> None:
        self._db = db
        self._path = path
        self._begin = begin
        self._group = group
        self._on_commit = on_commit
        self._on_undo = on_undo
        self._waiting: list[_Job] = []
        self._is_busy = False
        self._rows_copied = db.total_changes
        self._thread = ThreadPoolExecutor(1, f"store {begin.lower()}")
        database.wait_for_others(db, 0.0)

    async def run(self, work: Callable[[sqlite3.Connection], T], *, is_short: bool = False) -> T:
        """What `work` returns, once it is committed; raises what it raises, and StoreError for SQLite's errors.

        A caller cancelled before the job was taken up withdraws it; later the job is done all the same.
        """
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future(), is_short)
        self._waiting.append(job)
        if not self._is_busy:
            self._take_turn(loop)
        result: T = await job.done
        return result

    async def stop(self) -> None:
        """Finish the jobs that wait, then close the connection. Nothing may be run any more."""
        await self.run(lambda _: None)
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._db.close)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Do what waits, here or in the thread; the worker is busy until nothing does."""
        taken, self._waiting = self._waiting[: self._group], self._waiting[self._group :]
        jobs = [job for job in taken if not job.done.cancelled()]
        is_log_long = self._db.total_changes - self._rows_copied >= ROWS_PER_COPY
        if is_log_long or not all([job.is_short for job in jobs]) or self._transact(jobs, self._do) is not None:
            self._thread.submit(self._take_time, loop, jobs, is_log_long)
        else:
            self._go_on(loop, jobs)

    def _take_time(self, loop: asyncio.AbstractEventLoop, jobs: list[_Job], is_log_long: bool) -> None:
        """In the thread."""
        if is_log_long:
            database.copy_log(self._db)
            self._rows_copied = self._db.total_changes
        database.wait_for_others(self._db, database.BUSY_TIMEOUT_S)
        self._transact_surely(jobs)
        database.wait_for_others(self._db, 0.0)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so that nobody waits any more
            loop.call_soon_threadsafe(self._go_on, loop, jobs)

    def _go_on(self, loop: asyncio.AbstractEventLoop, jobs: list[_Job]) -> None:
        for job in jobs:
            if job.done.done():
                continue  # its caller was cancelled
            if job.failure is None:
                job.done.set_result(job.result)
            else:
                job.done.set_exception(job.failure)
        self._is_busy = False
        if self._waiting:
            self._take_turn(loop)

    def _take_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_busy = True
        # Not in the loop's next round but in the one after: what the next one's events ask for joins the transaction.
        loop.call_soon(loop.call_soon, self._turn, loop)

    def _transact_surely(self, jobs: list[_Job]) -> None:
        """Every job has its result or its failure then."""
        error = self._transact(jobs, self._do_apart)
        if error is None:
            return
        if len(jobs) > 1 and database.code(error) != sqlite3.SQLITE_BUSY:
            for job in jobs:
                self._transact_surely([job])
            return
        for job in jobs:
            job.failure = self._explained(error)

    def _transact(self, jobs: list[_Job], do: Callable[[_Job], None]) -> Exception | None:
        """The error for which the transaction was given up, if it was."""
        try:
            self._db.execute(self._begin)
            for job in jobs:
                do(job)
            self._db.execute("COMMIT")
        except Exception as error:  # whatever it is, it belongs to a caller who waits
            self._undo()
            return error
        self._on_commit()
        return None

    def _do(self, job: _Job) -> None:
        job.result = job.work(self._db)

    def _do_apart(self, job: _Job) -> None:
        """A failure of its own is the job's, and takes back nothing but the job."""
        self._db.execute("SAVEPOINT job")
        job.failure = None
        try:
            self._do(job)
        except Exception as error:
            if not self._db.in_transaction:
                raise
            self._db.execute("ROLLBACK TO job")
            job.failure = self._explained(error)
        self._db.execute("RELEASE job")

    def _explained(self, error: Exception) -> Exception:
        return database.explain(error, self._path) if isinstance(error, sqlite3.Error) else error

    def _undo(self) -> None:
        # On a failed disk this fails too: the next transaction cannot begin then, and it is tried again.
        with contextlib.suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        self._on_undo()
