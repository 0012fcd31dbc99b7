"""Attempts: who may run a rollout (leases), which attempts it has had, and their events."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from agl_runtime.errors import ConflictError
from agl_runtime.schemas import DEFAULT_ATTEMPT_ID, TERMINAL_STATES, Event, Rollout
from agl_runtime.store import blobs, rollouts
from agl_runtime.store.base import AttemptState
from agl_runtime.store.tables import Tables, read, read_at_once, write

_CLAIMABLE = """
    (state = 'queuing' OR state = 'running' AND (holder = :controller OR lease_until <= :now))
    AND rollout_id NOT IN (SELECT value FROM json_each(:held))
"""
_OPEN = """
    SELECT rollouts.n AS rollout, state, attempts.n AS attempt, sealed
    FROM rollouts LEFT JOIN attempts ON rollout = rollouts.n AND attempt_id = ? WHERE rollout_id = ?
"""


class Attempts(Tables):
    @write
    def claim(
        self, db: sqlite3.Connection, controller_id: str, limit: int, lease_s: float, held: Sequence[str] = ()
    ) -> list[tuple[Rollout, str]]:
        now, lease_now = self._clock(), self._steady()
        claimable = db.execute(
            f"SELECT n, rollout_id FROM rollouts WHERE {_CLAIMABLE} ORDER BY n LIMIT :limit",
            {"controller": controller_id, "now": lease_now, "held": json.dumps(list(held)), "limit": limit},
        ).fetchall()
        granted = []
        for row in claimable:
            attempt_id = _begin(db, row["n"], now)
            lease = "UPDATE rollouts SET state = 'running', holder = ?, lease_until = ? WHERE n = ?"
            db.execute(lease, (controller_id, lease_now + lease_s, row["n"]))
            granted.append((rollouts.get(db, row["rollout_id"]), attempt_id))
        return granted

    @write
    def renew(
        self, db: sqlite3.Connection, controller_id: str, rollout_ids: Sequence[str], lease_s: float
    ) -> list[str]:
        """A lease that ran out is still renewed as long as nobody else has claimed the rollout."""
        update = "UPDATE rollouts SET lease_until = ? WHERE rollout_id = ? AND holder = ?"
        until = self._steady() + lease_s
        return [name for name in rollout_ids if not db.execute(update, (until, name, controller_id)).rowcount]

    @write
    def next_attempt(self, db: sqlite3.Connection, rollout_id: str, controller_id: str, after: str) -> str:
        rollout = rollouts.row(db, rollout_id)
        if rollout["holder"] != controller_id:
            raise ConflictError(f"Controller {controller_id} does not hold rollout {rollout_id}.", "Claim it first.")
        if rollout["last_attempt_id"] != after:
            return str(rollout["last_attempt_id"])
        return _begin(db, rollout["n"], self._clock())

    @write
    def seal(self, db: sqlite3.Connection, rollout_id: str, attempt_id: str) -> None:
        number = find_or_begin(db, rollouts.row(db, rollout_id)["n"], attempt_id)
        db.execute("UPDATE attempts SET sealed = 1 WHERE n = ?", (number,))
        self._opened.forget(number)

    @read_at_once
    def attempt_state(self, db: sqlite3.Connection, rollout_id: str, attempt_id: str) -> AttemptState:
        found = _find(db, rollout_id, attempt_id)
        if _is_sealed(found):
            return "sealed"
        called = db.execute("SELECT 1 FROM calls WHERE attempt = ? LIMIT 1", (found["attempt"],)).fetchone()
        return "called" if called else "uncalled"

    @read
    def attempts(self, db: sqlite3.Connection, rollout_id: str) -> list[str]:
        return _ids(db, rollouts.row(db, rollout_id)["n"])

    @write
    def add_event(
        self,
        db: sqlite3.Connection,
        rollout_id: str,
        attempt_id: str,
        event_type: str,
        data: dict[str, Any],
        event_id: str | None = None,
    ) -> Event:
        rollout = rollouts.row(db, rollout_id)["n"]
        attempt = find_or_begin(db, rollout, attempt_id)
        db.execute(
            "INSERT INTO events (attempt, event_id, event_type, created_at, data) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (attempt, event_id) DO NOTHING",
            (attempt, event_id, event_type, self._clock(), blobs.put_json(db, rollout, data)),
        )
        stored = "attempt = :attempt AND (event_id = :event_id OR :event_id IS NULL) ORDER BY n DESC LIMIT 1"
        query = f"SELECT * FROM events WHERE {stored}"
        row = db.execute(query, {"attempt": attempt, "event_id": event_id}).fetchone()
        return _event(db, rollout_id, attempt_id, row)

    @read
    def events(self, db: sqlite3.Connection, rollout_id: str, attempt_id: str | None = None) -> list[Event]:
        attempt_id, number = resolve(db, rollout_id, attempt_id)
        rows = db.execute("SELECT * FROM events WHERE attempt = ? ORDER BY n", (number,)).fetchall()
        return [_event(db, rollout_id, attempt_id, row) for row in rows]


def find_open(db: sqlite3.Connection, rollout_id: str, attempt_id: str) -> tuple[int, int]:
    """The numbers of a rollout and of its attempt, which begins here when it is used for the first time. Raises
    NotFoundError, and ConflictError for a sealed attempt."""
    found = _find(db, rollout_id, attempt_id)
    refuse_sealed(rollout_id, attempt_id, found)
    return found["rollout"], found["attempt"] or find_or_begin(db, found["rollout"], attempt_id)


def refuse_sealed(rollout_id: str, attempt_id: str, found: sqlite3.Row) -> None:
    """`found` has the `state` of the rollout and whether the attempt is `sealed`. Raises ConflictError."""
    if _is_sealed(found):
        what = f"Attempt {attempt_id} of rollout {rollout_id} is sealed: it takes no more calls."
        raise ConflictError(what, "Its agent should have ended.")


def _is_sealed(found: sqlite3.Row) -> bool:
    return bool(found["sealed"]) or found["state"] in TERMINAL_STATES


def _find(db: sqlite3.Connection, rollout_id: str, attempt_id: str) -> sqlite3.Row:
    """No number of an attempt that is not used yet. Raises NotFoundError."""
    found: sqlite3.Row | None = db.execute(_OPEN, (attempt_id, rollout_id)).fetchone()
    if found is None:
        raise rollouts.missing(rollout_id)
    return found


def find_or_begin(db: sqlite3.Connection, rollout: int, attempt_id: str) -> int:
    """The number of an attempt; one that is used for the first time begins here."""
    db.execute("INSERT OR IGNORE INTO attempts (rollout, attempt_id) VALUES (?, ?)", (rollout, attempt_id))
    return _number(db, rollout, attempt_id) or 0


def resolve(db: sqlite3.Connection, rollout_id: str, attempt_id: str | None) -> tuple[str, int | None]:
    """(id, number) of an attempt, the last one by default; no number when nothing is known of it.

    The last attempt is what the rollout's status names, else the one begun last. Raises NotFoundError.
    """
    rollout = rollouts.row(db, rollout_id)
    attempt_id = attempt_id or rollout["last_attempt_id"] or [DEFAULT_ATTEMPT_ID, *_ids(db, rollout["n"])][-1]
    return attempt_id, _number(db, rollout["n"], attempt_id)


def _number(db: sqlite3.Connection, rollout: int, attempt_id: str) -> int | None:
    row = db.execute("SELECT n FROM attempts WHERE rollout = ? AND attempt_id = ?", (rollout, attempt_id)).fetchone()
    return int(row["n"]) if row else None


def _ids(db: sqlite3.Connection, rollout: int) -> list[str]:
    rows = db.execute("SELECT attempt_id FROM attempts WHERE rollout = ? ORDER BY n", (rollout,))
    return [row["attempt_id"] for row in rows]


def _begin(db: sqlite3.Connection, rollout: int, now: float) -> str:
    """Seal what came before and begin the attempt with the next number."""
    db.execute("UPDATE attempts SET sealed = 1 WHERE rollout = ?", (rollout,))
    attempt_id = str(1 + max((int(name) for name in _ids(db, rollout) if name.isdecimal()), default=-1))
    db.execute("INSERT INTO attempts (rollout, attempt_id) VALUES (?, ?)", (rollout, attempt_id))
    update = "UPDATE rollouts SET last_attempt_id = ?, version = version + 1, updated_at = ? WHERE n = ?"
    db.execute(update, (attempt_id, now, rollout))
    return attempt_id


def _event(db: sqlite3.Connection, rollout_id: str, attempt_id: str, row: sqlite3.Row) -> Event:
    return Event(
        event_type=row["event_type"],
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        timestamp=row["created_at"],
        data=blobs.get_json(db, row["data"]),
    )
