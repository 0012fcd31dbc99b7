"""The store in one SQLite file: `store.base.Store` on a writing and a reading thread.

Writes share transactions (see `worker`), reads see everything that was acknowledged before they were asked for.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agl_runtime.calls import CallInfo, PackedCall
from agl_runtime.errors import StoreError
from agl_runtime.schemas import (
    CheckpointRecord,
    Event,
    Rollout,
    RolloutCreate,
    RolloutState,
    RolloutStatusPatch,
    TerminalPage,
)
from agl_runtime.store import attempts, database, reading, recording, rollouts
from agl_runtime.store.base import Commit, Intent, StoredCall
from agl_runtime.store.worker import Worker

WRITES_PER_COMMIT = 256
PRUNED_PER_COMMIT = 20

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class SqliteStore:
    """`clock` gives seconds since the epoch; `budget_bytes` bounds what is remembered of attempts under way."""

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, budget_bytes: int = recording.BUDGET_BYTES
    ) -> None:
        self._path = path
        self._clock = clock
        self._opened = recording.OpenAttempts(budget_bytes)
        self._lock: sqlite3.Connection | None = None
        self._writer: Worker | None = None
        self._reader: Worker | None = None

    async def open(self) -> None:
        """Raises StoreError: no store, another version, damaged, or open elsewhere. Opening twice is no error."""
        await asyncio.to_thread(self.open_now)

    def open_now(self) -> None:
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
        self._writer = Worker(
            writer, self._path, begin="BEGIN IMMEDIATE", group=WRITES_PER_COMMIT, on_undo=self._opened.clear
        )
        self._reader = Worker(reader, self._path, begin="BEGIN", group=1)

    async def close(self) -> None:
        """Waits for what is under way. Closing twice is no error."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        for worker in (self._writer, self._reader):
            if worker is not None:
                worker.stop()
        self._writer = self._reader = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _write(self, work: Work[T]) -> T:
        return await self._running(self._writer).run(work)

    async def _read(self, work: Work[T]) -> T:
        return await self._running(self._reader).run(work)

    def _running(self, worker: Worker | None) -> Worker:
        if worker is None:
            raise StoreError(f"The store {self._path} is not open.", "Open it first.")
        return worker

    # rollouts

    async def add_rollouts(self, items: Sequence[RolloutCreate]) -> list[Rollout]:
        return await self._write(lambda db: rollouts.add(db, items, self._clock()))

    async def get_rollout(self, rollout_id: str) -> Rollout:
        return await self._read(lambda db: rollouts.get(db, rollout_id))

    async def list_rollouts(self, states: Sequence[RolloutState], limit: int) -> list[Rollout]:
        return await self._read(lambda db: rollouts.in_states(db, states, limit))

    async def patch_rollout(self, rollout_id: str, patch: RolloutStatusPatch) -> Rollout:
        return await self._write(lambda db: rollouts.patch(db, rollout_id, patch, self._clock()))

    async def delete_rollout(self, rollout_id: str) -> None:
        await self._write(lambda db: rollouts.delete(db, rollout_id))

    async def terminal_page(self, after: int, limit: int) -> TerminalPage:
        return await self._read(lambda db: rollouts.terminal_page(db, after, limit))

    # leases and attempts

    async def claim(
        self, controller_id: str, limit: int, lease_s: float, held: Sequence[str] = ()
    ) -> list[tuple[Rollout, str]]:
        return await self._write(lambda db: attempts.claim(db, controller_id, limit, lease_s, held, self._clock()))

    async def renew(self, controller_id: str, rollout_ids: Sequence[str], lease_s: float) -> list[str]:
        return await self._write(lambda db: attempts.renew(db, controller_id, rollout_ids, lease_s, self._clock()))

    async def next_attempt(self, rollout_id: str, controller_id: str, after: str) -> str:
        return await self._write(lambda db: attempts.next_attempt(db, rollout_id, controller_id, after, self._clock()))

    async def seal(self, rollout_id: str, attempt_id: str) -> None:
        await self._write(lambda db: self._opened.forget(attempts.seal(db, rollout_id, attempt_id)))

    async def is_sealed(self, rollout_id: str, attempt_id: str) -> bool:
        return await self._read(lambda db: attempts.is_sealed(db, rollout_id, attempt_id))

    async def attempts(self, rollout_id: str) -> list[str]:
        return await self._read(lambda db: attempts.ids(db, rollout_id))

    # events

    async def add_event(
        self, rollout_id: str, attempt_id: str, event_type: str, data: dict[str, Any], event_id: str | None = None
    ) -> Event:
        return await self._write(
            lambda db: attempts.add_event(db, rollout_id, attempt_id, event_type, data, event_id, self._clock())
        )

    async def events(self, rollout_id: str, attempt_id: str | None = None) -> list[Event]:
        return await self._read(lambda db: attempts.events(db, rollout_id, attempt_id))

    # calls

    async def begin_call(self, intent: Intent) -> CallInfo:
        def work(db: sqlite3.Connection) -> CallInfo:
            recording.begin(db, self._opened, intent, self._clock())
            return reading.info(db, intent.call_id)

        return await self._write(work)

    async def commit_call(self, commit: Commit) -> CallInfo:
        def work(db: sqlite3.Connection) -> CallInfo:
            recording.commit(db, self._opened, commit)
            return reading.info(db, commit.call_id)

        return await self._write(work)

    async def mark_delivered(self, call_id: str) -> None:
        await self._write(lambda db: recording.mark_delivered(db, call_id))

    async def find_retry(self, rollout_id: str, attempt_id: str, retry_key: str) -> StoredCall | None:
        return await self._read(lambda db: reading.newest_with_key(db, rollout_id, attempt_id, retry_key))

    async def calls(self, rollout_id: str, attempt_id: str | None = None) -> list[StoredCall]:
        return await self._read(lambda db: reading.calls(db, rollout_id, attempt_id))

    async def packed_calls(self, rollout_id: str) -> tuple[str, list[PackedCall], list[str]]:
        return await self._read(lambda db: reading.packed_calls(db, rollout_id))

    # the policy

    async def record_checkpoint(self, record: CheckpointRecord) -> None:
        await self._write(lambda db: rollouts.record_checkpoint(db, record))

    async def checkpoints(self, run_id: str | None = None) -> list[CheckpointRecord]:
        return await self._read(lambda db: rollouts.checkpoints(db, run_id))

    # upkeep

    async def counts(self) -> dict[str, int]:
        return await self._read(reading.counts)

    async def prune(self, keep_rollouts: int) -> int:
        gone = 0
        while batch := await self._write(lambda db: rollouts.prune(db, keep_rollouts, PRUNED_PER_COMMIT)):
            gone += batch
        return gone


def open_store(path: Path) -> SqliteStore:
    """The store in the file `path`, made when it is missing, opened. Raises StoreError as `SqliteStore.open` does."""
    store = SqliteStore(path)
    store.open_now()
    return store
