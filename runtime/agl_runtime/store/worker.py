"""A thread with one SQLite connection, which does the jobs of many concurrent tasks in shared transactions.

Whatever waits when the thread becomes free forms one transaction, and the loop is woken once for all of it. Each job
runs in a savepoint of its own: one that fails takes nothing of its neighbours back. A job's result is given out only
when its transaction is committed. When SQLite gives a whole transaction up, its jobs are done again one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agl_runtime.store import database

T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    """`result` and `failure` are set in the thread; `done` belongs to the loop."""

    work: Callable[[sqlite3.Connection], Any]
    done: asyncio.Future[Any]
    result: Any = None
    failure: Exception | None = None


class Worker:
    """`begin` opens a transaction for up to `group` jobs; `on_undo` is called in the thread after one was given up.

    Owns `db`, the file `path`. All its callers run in one loop.
    """

    def __init__(
        self, db: sqlite3.Connection, path: Path, begin: str, group: int, on_undo: Callable[[], None] = lambda: None
    ) -> None:
        self._db = db
        self._path = path
        self._begin = begin
        self._group = group
        self._on_undo = on_undo
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"store {begin.lower()}", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What `work` returns, once it is committed; raises what it raises, and StoreError for SQLite's errors.

        A caller cancelled before the thread took the job up withdraws it; later the job is done all the same.
        """
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._jobs.put(job)
        result: T = await job.done
        return result

    def stop(self) -> None:
        """Finish the jobs that wait, then close the connection. Blocks. Nothing may be run any more."""
        self._jobs.put(None)
        self._thread.join()
        self._db.close()

    def _serve(self) -> None:
        running = True
        while running:
            waiting = [self._jobs.get()]
            while len(waiting) < self._group and not self._jobs.empty():
                waiting.append(self._jobs.get())
            running = None not in waiting
            taken = [job for job in waiting if job is not None and not job.done.cancelled()]
            if taken:
                self._transact(taken)

    def _transact(self, jobs: list[_Job]) -> None:
        try:
            self._db.execute(self._begin)
            for job in jobs:
                self._do(job)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._undo()
            self._after_undo(jobs, error)
            return
        _give_out(jobs)

    def _do(self, job: _Job) -> None:
        self._db.execute("SAVEPOINT job")
        job.result, job.failure = None, None
        try:
            job.result = job.work(self._db)
        except Exception as error:  # whatever it is, it belongs to the caller who waits for this job
            if isinstance(error, sqlite3.Error) and not self._db.in_transaction:
                raise
            self._db.execute("ROLLBACK TO job")
            job.failure = database.explain(error, self._path) if isinstance(error, sqlite3.Error) else error
        self._db.execute("RELEASE job")

    def _after_undo(self, jobs: list[_Job], error: sqlite3.Error) -> None:
        if len(jobs) > 1 and database.code(error) != sqlite3.SQLITE_BUSY:
            for job in jobs:
                self._transact([job])
            return
        for job in jobs:
            job.failure = database.explain(error, self._path)
        _give_out(jobs)

    def _undo(self) -> None:
        # On a failed disk this fails too: the next transaction cannot begin then, and it is tried again.
        with contextlib.suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        self._on_undo()


def _give_out(jobs: list[_Job]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, so that nobody waits any more
        jobs[0].done.get_loop().call_soon_threadsafe(_settle, jobs)


def _settle(jobs: list[_Job]) -> None:
    for job in jobs:
        if job.done.done():
            continue  # its caller was cancelled
        if job.failure is None:
            job.done.set_result(job.result)
        else:
            job.done.set_exception(job.failure)
