"""Attempts in the database: who may run a rollout (leases), which attempts it has had, and their events.

Every function takes the connection of a transaction that its caller opens and commits.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from agl_runtime.errors import ConflictError
from agl_runtime.schemas import DEFAULT_ATTEMPT_ID, TERMINAL_STATES, Event, Rollout, RolloutState
from agl_runtime.store import blobs, rollouts


def claim(
    db: sqlite3.Connection, controller_id: str, limit: int, lease_s: float, held: Sequence[str], now: float
) -> list[tuple[Rollout, str]]:
    rows = db.execute(
        "SELECT n, rollout_id FROM rollouts WHERE state IN (:queuing, :running)"
        " AND (state = :queuing OR holder = :controller OR lease_until <= :now)"
        " AND rollout_id NOT IN (SELECT value FROM json_each(:held)) ORDER BY n LIMIT :limit",
        {
            "queuing": RolloutState.QUEUING,
            "running": RolloutState.RUNNING,
            "controller": controller_id,
            "now": now,
            "held": json.dumps(list(held)),
            "limit": limit,
        },
    ).fetchall()
    granted = []
    for row in rows:
        attempt_id = _begin(db, row["n"], now)
        db.execute(
            "UPDATE rollouts SET state = ?, holder = ?, lease_until = ? WHERE n = ?",
            (RolloutState.RUNNING, controller_id, now + lease_s, row["n"]),
        )
        granted.append((rollouts.get(db, row["rollout_id"]), attempt_id))
    return granted


def renew(
    db: sqlite3.Connection, controller_id: str, rollout_ids: Sequence[str], lease_s: float, now: float
) -> list[str]:
    return [
        rollout_id
        for rollout_id in rollout_ids
        if not db.execute(
            "UPDATE rollouts SET lease_until = ? WHERE rollout_id = ? AND holder = ?",
            (now + lease_s, rollout_id, controller_id),
        ).rowcount
    ]


def next_attempt(db: sqlite3.Connection, rollout_id: str, controller_id: str, after: str, now: float) -> str:
    rollout = rollouts.row(db, rollout_id)
    if rollout["holder"] != controller_id:
        raise ConflictError(f"Controller {controller_id} does not hold rollout {rollout_id}.", "Claim it first.")
    if rollout["last_attempt_id"] != after:
        return str(rollout["last_attempt_id"])
    return _begin(db, rollout["n"], now)


def _begin(db: sqlite3.Connection, rollout: int, now: float) -> str:
    """Seal what came before and begin the attempt with the next number."""
    db.execute("UPDATE attempts SET sealed = 1 WHERE rollout = ?", (rollout,))
    used = [row["attempt_id"] for row in db.execute("SELECT attempt_id FROM attempts WHERE rollout = ?", (rollout,))]
    attempt_id = str(1 + max((int(name) for name in used if name.isdecimal()), default=-1))
    db.execute("INSERT INTO attempts (rollout, attempt_id) VALUES (?, ?)", (rollout, attempt_id))
    db.execute(
        "UPDATE rollouts SET last_attempt_id = ?, version = version + 1, updated_at = ? WHERE n = ?",
        (attempt_id, now, rollout),
    )
    return attempt_id


def find_or_begin(db: sqlite3.Connection, rollout: int, attempt_id: str) -> int:
    """The number of an attempt; one that is used for the first time begins here."""
    db.execute("INSERT OR IGNORE INTO attempts (rollout, attempt_id) VALUES (?, ?)", (rollout, attempt_id))
    return int(_number(db, rollout, attempt_id) or 0)


def _number(db: sqlite3.Connection, rollout: int, attempt_id: str) -> int | None:
    row = db.execute("SELECT n FROM attempts WHERE rollout = ? AND attempt_id = ?", (rollout, attempt_id)).fetchone()
    return int(row["n"]) if row else None


def resolve(db: sqlite3.Connection, rollout_id: str, attempt_id: str | None) -> tuple[str, int | None]:
    """(id, number) of an attempt, the last one by default; no number when nothing is known of it.

    The last attempt is what the rollout's status names, else the one begun last. Raises NotFoundError.
    """
    rollout = rollouts.row(db, rollout_id)
    attempt_id = attempt_id or rollout["last_attempt_id"]
    if attempt_id is None:
        begun = _ids(db, rollout["n"])
        attempt_id = begun[-1] if begun else DEFAULT_ATTEMPT_ID
    return attempt_id, _number(db, rollout["n"], attempt_id)


def seal(db: sqlite3.Connection, rollout_id: str, attempt_id: str) -> int:
    """Returns the attempt's number."""
    number = find_or_begin(db, rollouts.row(db, rollout_id)["n"], attempt_id)
    db.execute("UPDATE attempts SET sealed = 1 WHERE n = ?", (number,))
    return number


def is_sealed(db: sqlite3.Connection, rollout_id: str, attempt_id: str) -> bool:
    """A rollout that has ended has no open attempt."""
    rollout = rollouts.row(db, rollout_id)
    if rollout["state"] in TERMINAL_STATES:
        return True
    found = db.execute(
        "SELECT sealed FROM attempts WHERE rollout = ? AND attempt_id = ?", (rollout["n"], attempt_id)
    ).fetchone()
    return bool(found and found["sealed"])


def ids(db: sqlite3.Connection, rollout_id: str) -> list[str]:
    return _ids(db, rollouts.row(db, rollout_id)["n"])


def _ids(db: sqlite3.Connection, rollout: int) -> list[str]:
    rows = db.execute("SELECT attempt_id FROM attempts WHERE rollout = ? ORDER BY n", (rollout,))
    return [row["attempt_id"] for row in rows]


def add_event(
    db: sqlite3.Connection,
    rollout_id: str,
    attempt_id: str,
    event_type: str,
    data: dict[str, Any],
    event_id: str | None,
    now: float,
) -> Event:
    rollout = rollouts.row(db, rollout_id)["n"]
    attempt = find_or_begin(db, rollout, attempt_id)
    first = db.execute("SELECT * FROM events WHERE attempt = ? AND event_id = ?", (attempt, event_id)).fetchone()
    if first is not None:
        return _event(db, rollout_id, attempt_id, first)
    db.execute(
        "INSERT INTO events (attempt, event_id, event_type, created_at, data) VALUES (?, ?, ?, ?, ?)",
        (attempt, event_id, event_type, now, blobs.put_json(db, rollout, data)),
    )
    return Event(event_type=event_type, rollout_id=rollout_id, attempt_id=attempt_id, timestamp=now, data=data)


def events(db: sqlite3.Connection, rollout_id: str, attempt_id: str | None) -> list[Event]:
    attempt_id, number = resolve(db, rollout_id, attempt_id)
    rows = db.execute("SELECT * FROM events WHERE attempt = ? ORDER BY n", (number,)).fetchall()
    return [_event(db, rollout_id, attempt_id, row) for row in rows]


def _event(db: sqlite3.Connection, rollout_id: str, attempt_id: str, row: sqlite3.Row) -> Event:
    return Event(
        event_type=row["event_type"],
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        timestamp=row["created_at"],
        data=blobs.get_json(db, row["data"]),
    )
