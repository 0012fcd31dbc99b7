"""Rollouts: enqueue, read, change state, delete, the log of finished ones, and what was trained of them."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Sequence
from typing import Any

from agl_runtime.errors import ConflictError, NotFoundError
from agl_runtime.schemas import (
    ALLOWED_TRANSITIONS,
    TERMINAL_STATES,
    CheckpointRecord,
    Rollout,
    RolloutConfig,
    RolloutCreate,
    RolloutState,
    RolloutStatus,
    RolloutStatusPatch,
    TerminalItem,
    TerminalPage,
)
from agl_runtime.store import blobs
from agl_runtime.store.tables import Tables, read, read_at_once, write

PRUNED_PER_COMMIT = 20


class Rollouts(Tables):
    @write
    def add_rollouts(self, db: sqlite3.Connection, items: Sequence[RolloutCreate]) -> list[Rollout]:
        named = [(item.rollout_id or uuid.uuid4().hex, item) for item in items]
        for rollout_id, item in named:
            _insert(db, rollout_id, item, self._clock())
        return [get(db, rollout_id) for rollout_id, _ in named]

    @read_at_once
    def get_rollout(self, db: sqlite3.Connection, rollout_id: str) -> Rollout:
        return get(db, rollout_id)

    @read
    def list_rollouts(self, db: sqlite3.Connection, states: Sequence[RolloutState], limit: int) -> list[Rollout]:
        query = "SELECT * FROM rollouts WHERE state IN (SELECT value FROM json_each(?)) ORDER BY n LIMIT ?"
        return [_build(db, found) for found in db.execute(query, (json.dumps(list(states)), limit)).fetchall()]

    @write
    def patch_rollout(self, db: sqlite3.Connection, rollout_id: str, patch: RolloutStatusPatch) -> Rollout:
        found = row(db, rollout_id)
        if patch.state is not None and patch.state not in ALLOWED_TRANSITIONS[found["state"]]:
            raise ConflictError(
                f"Rollout {rollout_id} cannot go from {found['state']} to {patch.state}.", "Read its state again."
            )
        changes = patch.model_dump(exclude={"state"} if patch.state is None else None, exclude_unset=True)
        if changes:
            assignments = "".join(f"{name} = :{name}, " for name in changes)
            update = f"UPDATE rollouts SET {assignments} version = version + 1, updated_at = :now WHERE n = :n"
            db.execute(update, {**changes, "now": self._clock(), "n": found["n"]})
        if patch.state in TERMINAL_STATES:
            _finish(db, found["n"])
        return get(db, rollout_id)

    @write
    def delete_rollout(self, db: sqlite3.Connection, rollout_id: str) -> None:
        _delete(db, rollout_id)

    @read
    def terminal_page(self, db: sqlite3.Connection, after: int, limit: int) -> TerminalPage:
        """Cursors are places in the log of finished rollouts; a deleted one keeps its place, so they stay valid."""
        limit = max(1, limit)
        total = db.execute("SELECT value FROM counters WHERE name = 'finished'").fetchone()[0]
        query = "SELECT * FROM rollouts WHERE finished > ? ORDER BY finished LIMIT ?"
        rows = db.execute(query, (after, limit)).fetchall()
        items = [TerminalItem(**{name: found[name] for name in TerminalItem.model_fields}) for found in rows]
        next_after = rows[-1]["finished"] if len(rows) == limit else max(after, total)
        return TerminalPage(items=items, next_after=next_after, total_terminal=total)

    @write
    def record_checkpoint(self, db: sqlite3.Connection, record: CheckpointRecord) -> None:
        insert = "INSERT INTO checkpoints (run_id, version, record) VALUES (?, ?, ?)"
        replace = "ON CONFLICT (run_id, version) DO UPDATE SET record = excluded.record"
        db.execute(f"{insert} {replace}", (record.run_id, record.version, record.model_dump_json()))

    @read
    def checkpoints(self, db: sqlite3.Connection, run_id: str | None = None) -> list[CheckpointRecord]:
        query = "SELECT record FROM checkpoints WHERE :run IS NULL OR run_id = :run ORDER BY n"
        rows = db.execute(query, {"run": run_id})
        return [CheckpointRecord.model_validate_json(found["record"]) for found in rows]

    async def prune(self, keep_rollouts: int) -> int:
        gone = 0
        while batch := await self._prune_some(keep_rollouts):
            gone += batch
        return gone

    @write
    def _prune_some(self, db: sqlite3.Connection, keep: int) -> int:
        """In small transactions, because recording waits for each."""
        finished = db.execute("SELECT COUNT(*) FROM rollouts WHERE finished IS NOT NULL").fetchone()[0]
        query = "SELECT rollout_id FROM rollouts WHERE finished IS NOT NULL ORDER BY finished LIMIT ?"
        rows = db.execute(query, (max(0, min(PRUNED_PER_COMMIT, finished - keep)),)).fetchall()
        for found in rows:
            _delete(db, found["rollout_id"])
        return len(rows)


def row(db: sqlite3.Connection, rollout_id: str) -> sqlite3.Row:
    """Raises NotFoundError."""
    found: sqlite3.Row | None = db.execute("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if found is None:
        raise missing(rollout_id)
    return found


def missing(rollout_id: str) -> NotFoundError:
    return NotFoundError(f"There is no rollout {rollout_id}.", "Look at `agl rollouts ls`.")


def get(db: sqlite3.Connection, rollout_id: str) -> Rollout:
    return _build(db, row(db, rollout_id))


def _build(db: sqlite3.Connection, found: sqlite3.Row) -> Rollout:
    status = RolloutStatus(**{name: found[name] for name in RolloutStatus.model_fields})
    body = blobs.get_json(db, found["body"])
    return Rollout(rollout_id=found["rollout_id"], is_train=bool(found["is_train"]), status=status, **body)


def _insert(db: sqlite3.Connection, rollout_id: str, item: RolloutCreate, now: float) -> None:
    inserted = db.execute(
        "INSERT INTO rollouts (rollout_id, is_train, data_id, state, version, created_at, updated_at, body)"
        " VALUES (?, ?, ?, 'queuing', 1, ?, ?, x'') ON CONFLICT (rollout_id) DO NOTHING",
        (rollout_id, item.is_train, _data_id(item.input), now, now),
    )
    if not inserted.rowcount:
        return
    body = {
        "input": item.input,
        "config": (item.config or RolloutConfig()).model_dump(mode="json"),
        "metadata": item.metadata.model_dump(mode="json", exclude_unset=True) if item.metadata else {},
    }
    number = int(inserted.lastrowid or 0)
    db.execute("UPDATE rollouts SET body = ? WHERE n = ?", (blobs.put_json(db, number, body), number))


def _data_id(task: Any) -> str:
    """What v1.0 calls a rollout's data id."""
    return str(task.get("data_id") or task.get("instance_id") or "") if isinstance(task, dict) else ""


def _finish(db: sqlite3.Connection, number: int) -> None:
    """Append to the log of finished rollouts, give the lease back and seal every attempt."""
    db.execute("UPDATE counters SET value = value + 1 WHERE name = 'finished'")
    place = "(SELECT value FROM counters WHERE name = 'finished')"
    db.execute(f"UPDATE rollouts SET holder = NULL, lease_until = NULL, finished = {place} WHERE n = ?", (number,))
    db.execute("UPDATE attempts SET sealed = 1 WHERE rollout = ?", (number,))


def _delete(db: sqlite3.Connection, rollout_id: str) -> None:
    found = db.execute("SELECT n FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if found is not None:
        used = blobs.used_by(db, found["n"])
        db.execute("DELETE FROM rollouts WHERE n = ?", (found["n"],))
        blobs.drop_unused(db, used)
