"""Model calls on their way out of the database, whole or as stored, and the counts."""

from __future__ import annotations

import sqlite3
from typing import Any

import numpy as np

from agl_runtime.calls import CallInfo, PackedCall, Routing, VersionSpan, routing_in
from agl_runtime.schemas import Model, PolicyVersion, RolloutState
from agl_runtime.store import attempts, blobs, codec
from agl_runtime.store.base import StoredCall
from agl_runtime.store.delivery import settle
from agl_runtime.store.open_attempts import delta_of
from agl_runtime.store.tables import Tables, read

_AS_STORED = ("call_id", "rollout_id", "attempt_id", "seq", "dialect", "parent_id", "kind", "model", "finish_reason")
_OWNERS = "FROM calls JOIN attempts ON attempts.n = attempt JOIN rollouts ON rollouts.n = rollout"
_CALLS = f"""
    SELECT calls.*, attempt_id, rollout_id, r.base_id AS request_base, r.record, r.digest AS request_digest, a.*
    {_OWNERS} JOIN requests r ON r.call = calls.n LEFT JOIN answers a ON a.call = calls.n
"""
# A call and those that its request is stored against.
_CHAIN = """
    WITH RECURSIVE chain (call) AS (
        SELECT MAX(n) FROM calls WHERE attempt = ? AND retry_key = ?
        UNION ALL
        SELECT base.n FROM chain JOIN requests USING (call) JOIN calls base ON base.call_id = base_id
    )
"""


class Reading(Tables):
    @read
    def find_retry(self, db: sqlite3.Connection, rollout_id: str, attempt_id: str, retry_key: str) -> StoredCall | None:
        _, attempt = attempts.resolve(db, rollout_id, attempt_id)
        query = f"{_CHAIN} {_CALLS} WHERE calls.n IN (SELECT call FROM chain) ORDER BY seq"
        found = _whole(db, db.execute(query, (attempt, retry_key)).fetchall())
        return found[-1] if found else None

    @read
    def calls(self, db: sqlite3.Connection, rollout_id: str, attempt_id: str | None = None) -> list[StoredCall]:
        _, attempt = attempts.resolve(db, rollout_id, attempt_id)
        return _whole(db, db.execute(f"{_CALLS} WHERE attempt = ? ORDER BY seq", (attempt,)).fetchall())

    @read
    def packed_calls(self, db: sqlite3.Connection, rollout_id: str) -> tuple[str, list[PackedCall], list[str]]:
        attempt_id, attempt = attempts.resolve(db, rollout_id, None)
        rows = db.execute(f"{_CALLS} WHERE attempt = ? ORDER BY commit_seq, seq", (attempt,)).fetchall()
        fetch = blobs.fetcher(db)
        extras = ((row, codec.unpack(row["extra"], fetch)) for row in rows if _is_committed(row))
        packed = [_packed(row, extra, _routing(extra, fetch)) for row, extra in extras]
        return attempt_id, packed, [row["call_id"] for row in rows if not _is_committed(row)]

    @read
    def counts(self, db: sqlite3.Connection) -> dict[str, int]:
        """`rollouts.<state>` for every state, `calls.trainable`, `calls.incomplete` and `calls.<reason>`."""
        found = {f"rollouts.{state.value}": 0 for state in RolloutState} | {"calls.trainable": 0, "calls.incomplete": 0}
        for state, count in db.execute("SELECT state, COUNT(*) FROM rollouts GROUP BY state"):
            found[f"rollouts.{state}"] = count
        facts = "commit_seq IS NULL AS incomplete, trainable, reason, delivered, continued, retried"
        for row in db.execute(f"SELECT {facts}, COUNT(*) AS count FROM calls GROUP BY 1, 2, 3, 4, 5, 6"):
            trainable, reason = (False, "incomplete") if row["incomplete"] else _settled(row)
            name = f"calls.{'trainable' if trainable else reason or 'untrainable'}"
            found[name] = found.get(name, 0) + row["count"]
        return found


def _is_committed(found: sqlite3.Row) -> bool:
    return found["commit_seq"] is not None


def _info(found: sqlite3.Row) -> CallInfo:
    committed = _is_committed(found)
    trainable, reason = _settled(found) if committed else (False, None)
    return CallInfo(
        **{name: found[name] for name in _AS_STORED},
        committed=committed,
        commit_seq=found["commit_seq"] if committed else -1,
        delivered=bool(found["delivered"]),
        trainable=trainable,
        reason=reason,
        http_status=found["http_status"],
    )


def _settled(found: sqlite3.Row) -> tuple[bool, str | None]:
    facts = {name: bool(found[name]) for name in ("delivered", "continued", "retried")}
    return settle(bool(found["trainable"]), found["reason"], **facts)


def _whole(db: sqlite3.Connection, rows: list[sqlite3.Row]) -> list[StoredCall]:
    """`rows` hold every base before what builds on it."""
    fetch = blobs.fetcher(db)
    decoded: dict[str, codec.Decoded] = {}
    for row in rows:
        base = decoded.get(row["request_base"])
        decoded[row["call_id"]] = codec.decode(row["record"], row["request_digest"], base, fetch)
    return [_stored(row, decoded[row["call_id"]], fetch) for row in rows]


def _stored(found: sqlite3.Row, request: codec.Decoded, fetch: codec.Fetch) -> StoredCall:
    if not _is_committed(found):
        return StoredCall(_info(found), found["created_at"], request.body, None, None, None, None, 0, {})
    extra = codec.unpack(found["extra"], fetch)
    return StoredCall(
        info=_info(found),
        created_at=found["created_at"],
        request=request.body,
        response=codec.unpack(found["response"], fetch),
        packed=_packed(found, extra),
        upstream=Model(**extra["upstream"]) if extra["upstream"] else None,
        latency_ms=extra["latency_ms"],
        retry_count=extra["retry_count"],
        usage=extra["usage"],
        side=extra["side"],
    )


def _routing(extra: dict[str, Any], fetch: codec.Fetch) -> Routing | None:
    if "routing" not in extra:
        return None
    shape, name = extra["routing"]
    return routing_in(shape, fetch(bytes.fromhex(name)))


def _packed(found: sqlite3.Row, extra: dict[str, Any], routing: Routing | None = None) -> PackedCall:
    return PackedCall(
        info=_info(found),
        prompt=delta_of(found),
        sampled_ids=np.frombuffer(found["sampled"], np.int32),
        logprobs=np.frombuffer(found["logprobs"], np.float32),
        spans=tuple(VersionSpan(start, end, PolicyVersion(*version)) for start, end, *version in extra["spans"]),
        routing=routing,
    )
