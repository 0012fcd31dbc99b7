"""The store in one SQLite file: `store.base.Store` on a writing and a reading connection.

Writes share transactions (see `worker`), reads see everything that was acknowledged before they were asked for.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from agl_runtime.errors import StoreError
from agl_runtime.store import database
from agl_runtime.store.attempts import Attempts
from agl_runtime.store.open_attempts import BUDGET_BYTES
from agl_runtime.store.reading import Reading
from agl_runtime.store.recording import Recording
from agl_runtime.store.rollouts import Rollouts
from agl_runtime.store.worker import Worker

WRITES_PER_COMMIT = 256


class SqliteStore(Rollouts, Attempts, Recording, Reading):
    """`clock` gives seconds since the epoch. Leases go by `steady`, which begins at the same time and is not moved when
    that clock is set. `budget_bytes` bounds what is remembered of attempts under way."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] | None = None,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        super().__init__(path, clock, steady or _steady(clock()), budget_bytes)
        self._lock: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Raises StoreError: no store, another version, damaged, or open elsewhere. Opening twice is no error."""
        await asyncio.to_thread(self.open_now)

    def open_now(self) -> None:
        """As `open`, outside a running loop."""
        if self._lock is not None:
            return
        lock = database.lock(self._path)
        try:
            writer = database.open_writer(self._path)
            reader = database.open_reader(self._path)
        except StoreError:
            lock.close()
            raise
        self._lock = lock
        known = self._opened
        self._writer = Worker(writer, self._path, "BEGIN IMMEDIATE", WRITES_PER_COMMIT, known.keep, known.undo)
        self._reader = Worker(reader, self._path, "BEGIN", 1)

    async def close(self) -> None:
        """Waits for what is under way. Closing twice is no error."""
        workers = [worker for worker in (self._writer, self._reader) if worker is not None]
        self._writer = self._reader = None
        for worker in workers:
            await worker.stop()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _steady(began: float) -> Callable[[], float]:
    offset = began - time.monotonic()
    return lambda: offset + time.monotonic()


def open_store(path: Path) -> SqliteStore:
    """The store in the file `path`, made when it is missing, opened. Raises StoreError as `SqliteStore.open` does."""
    store = SqliteStore(path)
    store.open_now()
    return store
