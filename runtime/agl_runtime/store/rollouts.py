"""Rollouts in the database: enqueue, read, change state, delete, the log of finished ones, what was trained of them.

Every function takes the connection of a transaction that its caller opens and commits.
"""

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
    RolloutMetadata,
    RolloutState,
    RolloutStatus,
    RolloutStatusPatch,
    TerminalItem,
    TerminalPage,
)
from agl_runtime.store import blobs


def add(db: sqlite3.Connection, items: Sequence[RolloutCreate], now: float) -> list[Rollout]:
    added = []
    for item in items:
        rollout_id = item.rollout_id or uuid.uuid4().hex
        if db.execute("SELECT 1 FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone() is None:
            _insert(db, rollout_id, item, now)
        added.append(get(db, rollout_id))
    return added


def _insert(db: sqlite3.Connection, rollout_id: str, item: RolloutCreate, now: float) -> None:
    number = db.execute(
        "INSERT INTO rollouts (rollout_id, is_train, data_id, input, config, metadata, state, version, created_at,"
        " updated_at) VALUES (?, ?, ?, x'', x'', x'', ?, 1, ?, ?)",
        (rollout_id, item.is_train, _data_id(item.input), RolloutState.QUEUING, now, now),
    ).lastrowid
    config = item.config.model_dump(mode="json") if item.config else {}
    metadata = item.metadata.model_dump(mode="json", exclude_unset=True) if item.metadata else {}
    packed = [blobs.put_json(db, number or 0, value) for value in (item.input, config, metadata)]
    db.execute("UPDATE rollouts SET input = ?, config = ?, metadata = ? WHERE n = ?", (*packed, number))


def _data_id(task: Any) -> str:
    """What v1.0 calls a rollout's data id."""
    return str(task.get("data_id") or task.get("instance_id") or "") if isinstance(task, dict) else ""


def row(db: sqlite3.Connection, rollout_id: str) -> sqlite3.Row:
    """Raises NotFoundError."""
    found: sqlite3.Row | None = db.execute("SELECT * FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if found is None:
        raise NotFoundError(f"There is no rollout {rollout_id}.", "Look at `agl rollouts`.")
    return found


def get(db: sqlite3.Connection, rollout_id: str) -> Rollout:
    return _build(db, row(db, rollout_id))


def _build(db: sqlite3.Connection, found: sqlite3.Row) -> Rollout:
    return Rollout(
        rollout_id=found["rollout_id"],
        input=blobs.get_json(db, found["input"]),
        is_train=bool(found["is_train"]),
        config=RolloutConfig(**blobs.get_json(db, found["config"])),
        metadata=RolloutMetadata(**blobs.get_json(db, found["metadata"])),
        status=RolloutStatus(**{name: found[name] for name in RolloutStatus.model_fields}),
    )


def in_states(db: sqlite3.Connection, states: Sequence[RolloutState], limit: int) -> list[Rollout]:
    rows = db.execute(
        "SELECT * FROM rollouts WHERE state IN (SELECT value FROM json_each(?)) ORDER BY n LIMIT ?",
        (json.dumps(list(states)), limit),
    ).fetchall()
    return [_build(db, found) for found in rows]


def patch(db: sqlite3.Connection, rollout_id: str, change: RolloutStatusPatch, now: float) -> Rollout:
    found = row(db, rollout_id)
    changes = change.model_dump(exclude_unset=True)
    if change.state is None:
        changes.pop("state", None)
    elif change.state not in ALLOWED_TRANSITIONS[RolloutState(found["state"])]:
        raise ConflictError(
            f"Rollout {rollout_id} cannot go from {found['state']} to {change.state}.", "Read it again."
        )
    if changes:
        assignments = "".join(f"{name} = :{name}, " for name in changes)
        db.execute(
            f"UPDATE rollouts SET {assignments} version = version + 1, updated_at = :now WHERE n = :n",
            {**changes, "now": now, "n": found["n"]},
        )
    if change.state in TERMINAL_STATES:
        _finish(db, found["n"])
    return get(db, rollout_id)


def _finish(db: sqlite3.Connection, number: int) -> None:
    """Append to the log of finished rollouts, give the lease back and seal every attempt."""
    db.execute("UPDATE counters SET value = value + 1 WHERE name = 'finished'")
    db.execute(
        "UPDATE rollouts SET holder = NULL, lease_until = NULL,"
        " finished = (SELECT value FROM counters WHERE name = 'finished') WHERE n = ?",
        (number,),
    )
    db.execute("UPDATE attempts SET sealed = 1 WHERE rollout = ?", (number,))


def delete(db: sqlite3.Connection, rollout_id: str) -> None:
    found = db.execute("SELECT n FROM rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
    if found is not None:
        used = blobs.used_by(db, found["n"])
        db.execute("DELETE FROM rollouts WHERE n = ?", (found["n"],))
        blobs.drop_unused(db, used)


def prune(db: sqlite3.Connection, keep: int, limit: int) -> int:
    """Delete up to `limit` of the finished rollouts beyond the `keep` newest, oldest first; returns how many went."""
    finished = db.execute("SELECT COUNT(*) FROM rollouts WHERE finished IS NOT NULL").fetchone()[0]
    rows = db.execute(
        "SELECT rollout_id FROM rollouts WHERE finished IS NOT NULL ORDER BY finished LIMIT ?",
        (max(0, min(limit, finished - keep)),),
    ).fetchall()
    for found in rows:
        delete(db, found["rollout_id"])
    return len(rows)


def terminal_page(db: sqlite3.Connection, after: int, limit: int) -> TerminalPage:
    """Cursors are places in the log of finished rollouts; a deleted rollout keeps its place, so cursors stay valid."""
    total = db.execute("SELECT value FROM counters WHERE name = 'finished'").fetchone()[0]
    rows = db.execute(
        "SELECT rollout_id, state, data_id, is_train, finished FROM rollouts WHERE finished > ?"
        " ORDER BY finished LIMIT ?",
        (after, max(1, limit)),
    ).fetchall()
    items = [TerminalItem(**{name: found[name] for name in TerminalItem.model_fields}) for found in rows]
    is_last = len(rows) < max(1, limit)
    next_after = max(after, total) if is_last else rows[-1]["finished"]
    return TerminalPage(items=items, next_after=next_after, total_terminal=total)


def record_checkpoint(db: sqlite3.Connection, record: CheckpointRecord) -> None:
    db.execute(
        "INSERT INTO checkpoints (run_id, version, step, path, rollout_ids) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (run_id, version) DO UPDATE SET step = excluded.step, path = excluded.path,"
        " rollout_ids = excluded.rollout_ids",
        (record.run_id, record.version, record.step, record.path, json.dumps(record.rollout_ids)),
    )


def checkpoints(db: sqlite3.Connection, run_id: str | None) -> list[CheckpointRecord]:
    """In order of their first recording."""
    rows = db.execute("SELECT * FROM checkpoints WHERE run_id = ? OR ? IS NULL ORDER BY n", (run_id, run_id))
    return [
        CheckpointRecord(
            run_id=found["run_id"],
            version=found["version"],
            step=found["step"],
            path=found["path"],
            rollout_ids=json.loads(found["rollout_ids"]),
        )
        for found in rows
    ]
