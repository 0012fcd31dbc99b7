"""Model calls on their way into the database: intent, commit, delivery."""

from __future__ import annotations

import sqlite3
from typing import Any

import numpy as np

from agl_runtime.calls import Delta, make_delta, new_routing, routing_out
from agl_runtime.errors import ConflictError, NotFoundError
from agl_runtime.store import attempts, blobs, codec
from agl_runtime.store.base import Commit, Intent
from agl_runtime.store.open_attempts import Begun
from agl_runtime.store.tables import Tables, write_at_once

MOST_IDS_AT_ONCE = 2**16

_BEGIN = """
    INSERT INTO calls (call_id, attempt, seq, created_at, dialect, model, kind, parent_id, retry_key)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (call_id) DO NOTHING
"""
_BEGUN = """
    SELECT calls.n, attempt, retry_key, commit_seq, attempt_id, sealed, rollout, rollout_id, state
    FROM calls JOIN attempts ON attempts.n = attempt JOIN rollouts ON rollouts.n = rollout WHERE call_id = ?
"""
_COMMIT = """
    UPDATE calls SET commit_seq = ?, trainable = ?, reason = ?, finish_reason = ?, http_status = ? WHERE n = ?
"""
_SAME_KEY = "attempt = :attempt AND retry_key = :retry_key AND commit_seq IS NOT NULL"
_RETRIED = f"UPDATE calls SET retried = 1 WHERE {_SAME_KEY} AND n < (SELECT MAX(n) FROM calls WHERE {_SAME_KEY})"


class Recording(Tables):
    @write_at_once(lambda intent: not intent.is_long)
    def begin_call(self, db: sqlite3.Connection, intent: Intent) -> None:
        """Raises NotFoundError, ConflictError for a sealed attempt or a known id, StoreError for no plain JSON."""
        place = intent.rollout_id, intent.attempt_id
        rollout, attempt = self._opened.places.get(place) or attempts.find_open(db, *place)
        known = self._opened.get(db, attempt)
        request = codec.encode(intent.request, known.outlines)
        static = (intent.dialect, intent.model, intent.kind, intent.parent_id, intent.retry_key)
        begun = db.execute(_BEGIN, (intent.call_id, attempt, known.begun, self._clock(), *static))
        if not begun.rowcount:
            raise ConflictError(f"Call {intent.call_id} has begun already.", "Give every call its own id.")
        stored = (begun.lastrowid, request.base_id, request.record, request.digest)
        db.execute("INSERT INTO requests VALUES (?, ?, ?, ?)", stored)
        blobs.keep(db, rollout, request.blobs)
        known.begin(intent.call_id, request.outline, intent.retry_key)
        self._opened.places[place] = rollout, attempt
        self._opened.begun[intent.call_id] = Begun(begun.lastrowid or 0, attempt, rollout, intent.retry_key)

    @write_at_once(
        lambda commit: commit.routed is None and commit.prompt_ids.size + commit.sampled_ids.size <= MOST_IDS_AT_ONCE
    )
    def commit_call(self, db: sqlite3.Connection, commit: Commit) -> None:
        """Raises NotFoundError for an unknown call, ConflictError for a sealed attempt or a second commit."""
        call = self._opened.begun.pop(commit.call_id, None) or _begun(db, commit.call_id)
        known = self._opened.get(db, call.attempt)
        prompt = np.ascontiguousarray(commit.prompt_ids, np.int32)
        base_id, keep, continued = known.match(prompt)
        _insert_answer(db, call, commit, make_delta(prompt, base_id, keep))
        found = (commit.trainable, commit.reason, commit.finish_reason, commit.http_status)
        db.execute(_COMMIT, (known.committed, *found, call.n))
        db.executemany("UPDATE calls SET continued = 1 WHERE call_id = ?", [(call_id,) for call_id in continued])
        if known.is_retried(call.retry_key):
            db.execute(_RETRIED, {"attempt": call.attempt, "retry_key": call.retry_key})
        whole = np.concatenate([prompt, commit.sampled_ids], dtype=np.int32)
        self._opened.commit(call.attempt, commit.call_id, whole, continued)

    @write_at_once(lambda _: True)
    def mark_delivered(self, db: sqlite3.Connection, call_id: str) -> None:
        db.execute("UPDATE calls SET delivered = 1 WHERE call_id = ? AND commit_seq IS NOT NULL", (call_id,))


def _begun(db: sqlite3.Connection, call_id: str) -> Begun:
    call: sqlite3.Row | None = db.execute(_BEGUN, (call_id,)).fetchone()
    if call is None:
        raise NotFoundError(f"There is no call {call_id}.", "Its rollout was deleted, or it never began.")
    attempts.refuse_sealed(call["rollout_id"], call["attempt_id"], call)
    if call["commit_seq"] is not None:
        raise ConflictError(f"Call {call_id} is committed already.", "Read the stored answer.")
    return Begun(call["n"], call["attempt"], call["rollout"], call["retry_key"])


def _insert_answer(db: sqlite3.Connection, call: Begun, commit: Commit, prompt: Delta) -> None:
    extra: dict[str, Any] = {
        "spans": [[span.start, span.end, *span.version] for span in commit.spans],
        "upstream": commit.upstream.model_dump(mode="json") if commit.upstream else None,
        "latency_ms": commit.latency_ms,
        "retry_count": commit.retry_count,
        "usage": commit.usage,
        "side": commit.side,
    }
    if commit.routed is not None:
        shape, experts = routing_out(new_routing(commit.routed, prompt, _base_shape(db, prompt.base_id)))
        digest = codec.digest_of(experts)
        extra["routing"] = [shape, digest.hex()]
        blobs.keep(db, call.rollout, {digest: experts})
    delta = (prompt.base_id, prompt.keep, prompt.tail.tobytes(), prompt.digest)
    sampled = np.ascontiguousarray(commit.sampled_ids, np.int32).tobytes()
    logprobs = np.ascontiguousarray(commit.logprobs, np.float32).tobytes()
    packed = (blobs.put_json(db, call.rollout, value) for value in (commit.response, extra))
    answer = (call.n, *delta, sampled, logprobs, *packed)
    db.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", answer)


def _base_shape(db: sqlite3.Connection, base_id: str | None) -> list[int] | None:
    """Layers and experts of the routing of a call, None where it has none."""
    base = db.execute("SELECT extra FROM answers JOIN calls ON call = n WHERE call_id = ?", (base_id,)).fetchone()
    extra = codec.unpack(base["extra"], blobs.fetcher(db)) if base else {}
    return extra["routing"][0][1:3] if "routing" in extra else None
