"""Model calls on their way into the database: intent, commit, delivery."""

from __future__ import annotations

import sqlite3

import numpy as np

from agl_runtime.calls import CallInfo, Delta, common_prefix, make_delta
from agl_runtime.errors import ConflictError
from agl_runtime.store import attempts, blobs, codec, reading, rollouts
from agl_runtime.store.base import Commit, Intent
from agl_runtime.store.tables import Tables, write

_SAME_KEY = "attempt = :attempt AND retry_key = :key AND commit_seq IS NOT NULL"


class Recording(Tables):
    @write
    def begin_call(self, db: sqlite3.Connection, intent: Intent) -> CallInfo:
        """Raises NotFoundError, ConflictError for a sealed attempt or a known id, StoreError for no plain JSON."""
        rollout = rollouts.row(db, intent.rollout_id)
        _refuse_sealed(db, rollout, intent.attempt_id)
        if db.execute("SELECT 1 FROM calls WHERE call_id = ?", (intent.call_id,)).fetchone():
            raise ConflictError(f"Call {intent.call_id} has begun already.", "Give every call its own id.")
        attempt = attempts.find_or_begin(db, rollout["n"], intent.attempt_id)
        known = self._opened.get(db, attempt)
        request = codec.encode(intent.request, known.outlines)
        static = (intent.dialect, intent.model, intent.kind, intent.parent_id, intent.retry_key)
        seq = "(SELECT COUNT(*) FROM calls WHERE attempt = ?)"
        number = db.execute(
            "INSERT INTO calls (call_id, attempt, seq, created_at, dialect, model, kind, parent_id, retry_key)"
            f" VALUES (?, ?, {seq}, ?, ?, ?, ?, ?, ?)",
            (intent.call_id, attempt, attempt, self._clock(), *static),
        ).lastrowid
        stored = (number, request.base_id, request.record, request.digest)
        db.execute("INSERT INTO requests VALUES (?, ?, ?, ?)", stored)
        blobs.keep(db, rollout["n"], request.blobs)
        known.add_outline(intent.call_id, request.outline)
        return reading.info(db, intent.call_id)

    @write
    def commit_call(self, db: sqlite3.Connection, commit: Commit) -> CallInfo:
        """Raises NotFoundError for an unknown call, ConflictError for a sealed attempt or a second commit."""
        call = _begun(db, commit.call_id)
        attempt = call["attempt"]
        known = self._opened.get(db, attempt)
        prompt = np.ascontiguousarray(commit.prompt_ids, np.int32)
        whole = np.concatenate([prompt, commit.sampled_ids], dtype=np.int32)
        shared = {call_id: common_prefix(prompt, ids) for call_id, ids in known.ends.items()}
        base_id = max(shared, key=lambda call_id: shared[call_id], default="")
        continued = [call_id for call_id, count in shared.items() if count == known.ends[call_id].size]
        _insert_answer(db, call, commit, make_delta(prompt, base_id, known.ends.get(base_id)))
        db.execute(
            "UPDATE calls SET commit_seq = (SELECT COUNT(commit_seq) FROM calls WHERE attempt = ?), trainable = ?,"
            " reason = ?, finish_reason = ?, http_status = ? WHERE n = ?",
            (attempt, commit.trainable, commit.reason, commit.finish_reason, commit.http_status, call["n"]),
        )
        db.executemany("UPDATE calls SET continued = 1 WHERE call_id = ?", [(call_id,) for call_id in continued])
        older = f"{_SAME_KEY} AND n < (SELECT MAX(n) FROM calls WHERE {_SAME_KEY})"
        db.execute(f"UPDATE calls SET retried = 1 WHERE {older}", {"attempt": attempt, "key": call["retry_key"]})
        for call_id in continued:
            del known.ends[call_id]
        if whole.size:
            known.ends[commit.call_id] = whole
        return reading.info(db, commit.call_id)

    @write
    def mark_delivered(self, db: sqlite3.Connection, call_id: str) -> None:
        db.execute("UPDATE calls SET delivered = 1 WHERE call_id = ? AND commit_seq IS NOT NULL", (call_id,))


def _begun(db: sqlite3.Connection, call_id: str) -> sqlite3.Row:
    call = reading.row(db, call_id)
    _refuse_sealed(db, rollouts.row(db, call["rollout_id"]), call["attempt_id"])
    if call["commit_seq"] is not None:
        raise ConflictError(f"Call {call_id} is committed already.", "Read the stored answer.")
    return call


def _refuse_sealed(db: sqlite3.Connection, rollout: sqlite3.Row, attempt_id: str) -> None:
    if attempts.is_sealed(db, rollout, attempt_id):
        what = f"Attempt {attempt_id} of rollout {rollout['rollout_id']} is sealed: it takes no more calls."
        raise ConflictError(what, "Its agent should have ended.")


def _insert_answer(db: sqlite3.Connection, call: sqlite3.Row, commit: Commit, prompt: Delta) -> None:
    extra = {
        "spans": [[span.start, span.end, *span.version] for span in commit.spans],
        "upstream": commit.upstream.model_dump(mode="json") if commit.upstream else None,
        "latency_ms": commit.latency_ms,
        "retry_count": commit.retry_count,
        "usage": commit.usage,
        "side": commit.side,
    }
    delta = (prompt.base_id, prompt.keep, prompt.tail.tobytes(), prompt.digest)
    sampled = np.ascontiguousarray(commit.sampled_ids, np.int32).tobytes()
    logprobs = np.ascontiguousarray(commit.logprobs, np.float32).tobytes()
    packed = (blobs.put_json(db, call["rollout"], value) for value in (commit.response, extra))
    answer = (call["n"], *delta, sampled, logprobs, *packed)
    db.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", answer)
