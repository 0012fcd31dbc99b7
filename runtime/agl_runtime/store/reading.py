"""Model calls on their way out of the database, whole or as stored, and the counts.

Every function takes the connection of a transaction that its caller opens.
"""

from __future__ import annotations

import sqlite3

import numpy as np

from agl_runtime.calls import CallInfo, Delta, PackedCall, VersionSpan
from agl_runtime.schemas import Model, PolicyVersion, RolloutState
from agl_runtime.store import attempts, blobs, codec
from agl_runtime.store.base import StoredCall
from agl_runtime.store.delivery import settle

_INFO = "calls.*, attempts.attempt_id, rollouts.rollout_id"
_OWNERS = "calls JOIN attempts ON attempts.n = calls.attempt JOIN rollouts ON rollouts.n = attempts.rollout"
_ANSWER = "a.call AS answered, a.base_id, a.keep, a.tail, a.digest, a.sampled, a.logprobs, a.response, a.extra"
_REQUEST = "r.base_id AS request_base, r.record, r.digest AS request_digest"


def info(db: sqlite3.Connection, call_id: str) -> CallInfo:
    return _info(db.execute(f"SELECT {_INFO} FROM {_OWNERS} WHERE call_id = ?", (call_id,)).fetchone())


def _info(row: sqlite3.Row) -> CallInfo:
    committed = row["commit_seq"] is not None
    trainable, reason = _settled(row) if committed else (False, None)
    return CallInfo(
        call_id=row["call_id"],
        rollout_id=row["rollout_id"],
        attempt_id=row["attempt_id"],
        seq=row["seq"],
        dialect=row["dialect"],
        committed=committed,
        commit_seq=row["commit_seq"] if committed else -1,
        delivered=bool(row["delivered"]),
        parent_id=row["parent_id"],
        kind=row["kind"],
        trainable=trainable,
        reason=reason,
        model=row["model"],
        finish_reason=row["finish_reason"],
        http_status=row["http_status"],
    )


def _settled(row: sqlite3.Row) -> tuple[bool, str | None]:
    return settle(
        bool(row["trainable"]),
        row["reason"],
        delivered=bool(row["delivered"]),
        continued=bool(row["continued"]),
        retried=bool(row["retried"]),
    )


def calls(db: sqlite3.Connection, rollout_id: str, attempt_id: str | None) -> list[StoredCall]:
    _, attempt = attempts.resolve(db, rollout_id, attempt_id)
    rows = db.execute(
        f"SELECT {_INFO}, {_REQUEST}, {_ANSWER} FROM {_OWNERS} JOIN requests r ON r.call = calls.n"
        " LEFT JOIN answers a ON a.call = calls.n WHERE calls.attempt = ? ORDER BY seq",
        (attempt,),
    ).fetchall()
    return _whole(db, rows)


def newest_with_key(db: sqlite3.Connection, rollout_id: str, attempt_id: str, retry_key: str) -> StoredCall | None:
    _, attempt = attempts.resolve(db, rollout_id, attempt_id)
    newest = db.execute(
        "SELECT MAX(seq) FROM calls WHERE attempt = ? AND retry_key = ?", (attempt, retry_key)
    ).fetchone()[0]
    if newest is None:
        return None
    rows = db.execute(
        "WITH RECURSIVE chain (call) AS (SELECT n FROM calls WHERE attempt = ? AND seq = ? UNION ALL"
        " SELECT base.n FROM chain JOIN requests ON requests.call = chain.call"
        " JOIN calls base ON base.call_id = requests.base_id)"
        f" SELECT {_INFO}, {_REQUEST}, {_ANSWER} FROM {_OWNERS} JOIN requests r ON r.call = calls.n"
        " LEFT JOIN answers a ON a.call = calls.n WHERE calls.n IN (SELECT call FROM chain) ORDER BY seq",
        (attempt, newest),
    ).fetchall()
    return _whole(db, rows)[-1]


def _whole(db: sqlite3.Connection, rows: list[sqlite3.Row]) -> list[StoredCall]:
    """`rows` hold every base before what builds on it."""
    fetch = blobs.fetcher(db)
    decoded: dict[str, codec.Decoded] = {}
    for row in rows:
        base = decoded.get(row["request_base"])
        decoded[row["call_id"]] = codec.decode(row["record"], row["request_digest"], base, fetch)
    return [_stored(row, decoded[row["call_id"]], fetch) for row in rows]


def _stored(row: sqlite3.Row, request: codec.Decoded, fetch: codec.Fetch) -> StoredCall:
    if row["answered"] is None:
        return StoredCall(_info(row), row["created_at"], request.body, None, None, None, None, 0, {})
    extra = codec.unpack(row["extra"], fetch)
    return StoredCall(
        info=_info(row),
        created_at=row["created_at"],
        request=request.body,
        response=codec.unpack(row["response"], fetch),
        packed=_packed(row, fetch),
        upstream=Model(**extra["upstream"]) if extra["upstream"] else None,
        latency_ms=extra["latency_ms"],
        retry_count=extra["retry_count"],
        usage=extra["usage"],
        side=extra["side"],
    )


def _packed(row: sqlite3.Row, fetch: codec.Fetch) -> PackedCall:
    spans = codec.unpack(row["extra"], fetch)["spans"]
    return PackedCall(
        info=_info(row),
        prompt=Delta(row["base_id"], row["keep"], np.frombuffer(row["tail"], np.int32), row["digest"]),
        sampled_ids=np.frombuffer(row["sampled"], np.int32),
        logprobs=np.frombuffer(row["logprobs"], np.float32),
        spans=tuple(VersionSpan(start, end, PolicyVersion(*version)) for start, end, *version in spans),
    )


def packed_calls(db: sqlite3.Connection, rollout_id: str) -> tuple[str, list[PackedCall], list[str]]:
    attempt_id, attempt = attempts.resolve(db, rollout_id, None)
    rows = db.execute(
        f"SELECT {_INFO}, {_ANSWER} FROM {_OWNERS} JOIN answers a ON a.call = calls.n WHERE calls.attempt = ?"
        " ORDER BY commit_seq",
        (attempt,),
    ).fetchall()
    incomplete = db.execute(
        "SELECT call_id FROM calls WHERE attempt = ? AND commit_seq IS NULL ORDER BY seq", (attempt,)
    ).fetchall()
    fetch = blobs.fetcher(db)
    return attempt_id, [_packed(row, fetch) for row in rows], [row["call_id"] for row in incomplete]


def counts(db: sqlite3.Connection) -> dict[str, int]:
    """`rollouts.<state>` for every state, `calls.trainable`, `calls.incomplete` and `calls.<reason>`."""
    found = {f"rollouts.{state.value}": 0 for state in RolloutState} | {"calls.trainable": 0, "calls.incomplete": 0}
    for row in db.execute("SELECT state, COUNT(*) AS count FROM rollouts GROUP BY state"):
        found[f"rollouts.{row['state']}"] = row["count"]
    for row in db.execute(
        "SELECT commit_seq IS NOT NULL AS committed, trainable, reason, delivered, continued, retried,"
        " COUNT(*) AS count FROM calls GROUP BY 1, 2, 3, 4, 5, 6"
    ):
        trainable, reason = _settled(row) if row["committed"] else (False, "incomplete")
        name = f"calls.{'trainable' if trainable else reason or 'untrainable'}"
        found[name] = found.get(name, 0) + row["count"]
    return found
