"""Model calls on their way into the database: intent, commit, delivery.

`OpenAttempts` remembers, for attempts that are under way, what a later call may build on: of token ids only the
branches' ends (a call whose prompt + sampled ids begin a later prompt is contained in that one), of requests only those
that no later one covers. It belongs to the writing thread, is rebuilt from the database when it is cold, and is
cleared when a transaction is given up. Functions change it last, when nothing of theirs can fail any more.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from agl_runtime.calls import Delta, Ids, common_prefix, make_delta, rebuild
from agl_runtime.errors import ConflictError, NotFoundError
from agl_runtime.schemas import TERMINAL_STATES
from agl_runtime.store import attempts, blobs, codec, rollouts
from agl_runtime.store.base import Commit, Intent

BUDGET_BYTES = 128 * 2**20
MOST_OUTLINES = 16


@dataclass(slots=True)
class OpenAttempt:
    """`ends`: committed calls that none continues, as prompt + sampled ids [P + S]. Both by call id, oldest first."""

    ends: dict[str, Ids] = field(default_factory=dict)
    outlines: dict[str, codec.Outline] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(ids.nbytes for ids in self.ends.values())

    def add_outline(self, call_id: str, outline: codec.Outline) -> None:
        covered = [old_id for old_id, old in self.outlines.items() if codec.covers(outline, old)]
        for old_id in covered:
            del self.outlines[old_id]
        self.outlines[call_id] = outline
        if len(self.outlines) > MOST_OUTLINES:
            del self.outlines[next(iter(self.outlines))]


class OpenAttempts:
    """The most recently used attempts, by their number, within `budget_bytes` of token ids."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._attempts: OrderedDict[int, OpenAttempt] = OrderedDict()

    def get(self, db: sqlite3.Connection, attempt: int) -> OpenAttempt:
        if attempt not in self._attempts:
            self._attempts[attempt] = _load(db, attempt)
            total_bytes = sum(item.size_bytes for item in self._attempts.values())
            while total_bytes > self._budget_bytes and len(self._attempts) > 1:
                total_bytes -= self._attempts.popitem(last=False)[1].size_bytes
        self._attempts.move_to_end(attempt)
        return self._attempts[attempt]

    def forget(self, attempt: int) -> None:
        self._attempts.pop(attempt, None)

    def clear(self) -> None:
        self._attempts.clear()


def _load(db: sqlite3.Connection, attempt: int) -> OpenAttempt:
    loaded = OpenAttempt()
    outlines: dict[str, codec.Outline] = {}
    for row in db.execute(
        "SELECT call_id, base_id, record FROM calls JOIN requests ON call = n WHERE attempt = ? ORDER BY n", (attempt,)
    ):
        outlines[row["call_id"]] = codec.outline_of(row["record"], outlines.get(row["base_id"]))
        loaded.add_outline(row["call_id"], outlines[row["call_id"]])
    whole: dict[str, Ids] = {}
    for row in db.execute(
        "SELECT call_id, continued, base_id, keep, tail, digest, sampled FROM calls JOIN answers ON call = n"
        " WHERE attempt = ? ORDER BY commit_seq",
        (attempt,),
    ):
        call_id = row["call_id"]
        delta = Delta(row["base_id"], row["keep"], np.frombuffer(row["tail"], np.int32), row["digest"])
        whole[call_id] = np.concatenate([rebuild(delta, whole, call_id), np.frombuffer(row["sampled"], np.int32)])
        if whole[call_id].size and not row["continued"]:
            loaded.ends[call_id] = whole[call_id]
    return loaded


def begin(db: sqlite3.Connection, opened: OpenAttempts, intent: Intent, now: float) -> None:
    """Raises NotFoundError, ConflictError for a sealed attempt, StoreError for what cannot be stored."""
    rollout = rollouts.row(db, intent.rollout_id)
    attempt = attempts.find_or_begin(db, rollout["n"], intent.attempt_id)
    if attempts.is_sealed(db, intent.rollout_id, intent.attempt_id):
        raise _sealed(intent.rollout_id, intent.attempt_id)
    if db.execute("SELECT 1 FROM calls WHERE call_id = ?", (intent.call_id,)).fetchone():
        raise ConflictError(f"Call {intent.call_id} has begun already.", "Give every call its own id.")
    known = opened.get(db, attempt)
    encoded = codec.encode(intent.request, known.outlines)
    number = db.execute(
        "INSERT INTO calls (call_id, attempt, seq, created_at, dialect, model, kind, parent_id, retry_key) SELECT"
        " ?, ?, (SELECT COUNT(*) FROM calls WHERE attempt = ?), ?, ?, ?, ?, ?, ?",
        (
            *(intent.call_id, attempt, attempt, now, intent.dialect),
            *(intent.model, intent.kind, intent.parent_id, intent.retry_key),
        ),
    ).lastrowid
    db.execute("INSERT INTO requests VALUES (?, ?, ?, ?)", (number, encoded.base_id, encoded.record, encoded.digest))
    blobs.keep(db, rollout["n"], encoded.blobs)
    known.add_outline(intent.call_id, encoded.outline)


def commit(db: sqlite3.Connection, opened: OpenAttempts, item: Commit) -> None:
    """Raises NotFoundError for an unknown call, ConflictError for a sealed attempt or a second commit."""
    call = _begun(db, item.call_id)
    known = opened.get(db, call["attempt"])
    prompt = np.ascontiguousarray(item.prompt_ids, np.int32)
    sampled = np.ascontiguousarray(item.sampled_ids, np.int32)
    shared = {call_id: common_prefix(prompt, ids) for call_id, ids in known.ends.items()}
    base_id = max(shared, key=lambda call_id: shared[call_id], default=None)
    delta = make_delta(prompt, base_id, known.ends[base_id] if base_id is not None else None)
    continued = [call_id for call_id, count in shared.items() if count == known.ends[call_id].size]
    _insert_answer(db, call, item, delta, sampled)
    db.executemany("UPDATE calls SET continued = 1 WHERE call_id = ?", [(call_id,) for call_id in continued])
    if call["retry_key"] is not None:
        _mark_retried(db, call["attempt"], call["retry_key"])
    for call_id in continued:
        del known.ends[call_id]
    if prompt.size + sampled.size:
        known.ends[item.call_id] = np.concatenate([prompt, sampled])


def _begun(db: sqlite3.Connection, call_id: str) -> sqlite3.Row:
    call: sqlite3.Row | None = db.execute(
        "SELECT calls.n, attempt, rollout, retry_key, commit_seq, sealed, state, rollout_id, attempt_id FROM calls"
        " JOIN attempts ON attempts.n = attempt JOIN rollouts ON rollouts.n = rollout WHERE call_id = ?",
        (call_id,),
    ).fetchone()
    if call is None:
        raise NotFoundError(f"There is no call {call_id}.", "Its rollout was deleted, or it never began.")
    if call["sealed"] or call["state"] in TERMINAL_STATES:
        raise _sealed(call["rollout_id"], call["attempt_id"])
    if call["commit_seq"] is not None:
        raise ConflictError(f"Call {call_id} is committed already.", "Read the stored answer.")
    return call


def _insert_answer(db: sqlite3.Connection, call: sqlite3.Row, item: Commit, delta: Delta, sampled: Ids) -> None:
    extra = {
        "spans": [[span.start, span.end, *span.version] for span in item.spans],
        "upstream": item.upstream.model_dump(mode="json") if item.upstream else None,
        "latency_ms": item.latency_ms,
        "retry_count": item.retry_count,
        "usage": item.usage,
        "side": item.side,
    }
    logprobs = np.ascontiguousarray(item.logprobs, np.float32).tobytes()
    response, packed_extra = (blobs.put_json(db, call["rollout"], value) for value in (item.response, extra))
    db.execute(
        "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(call["n"], delta.base_id, delta.keep, delta.tail.tobytes(), delta.digest),
            *(sampled.tobytes(), logprobs, response, packed_extra),
        ),
    )
    db.execute(
        "UPDATE calls SET commit_seq = (SELECT COUNT(commit_seq) FROM calls WHERE attempt = ?), trainable = ?,"
        " reason = ?, finish_reason = ?, http_status = ? WHERE n = ?",
        (call["attempt"], item.trainable, item.reason, item.finish_reason, item.http_status, call["n"]),
    )


def _mark_retried(db: sqlite3.Connection, attempt: int, retry_key: str) -> None:
    """Of the committed calls with this key all but the newest have been tried again."""
    db.execute(
        "UPDATE calls SET retried = n < (SELECT MAX(n) FROM calls WHERE attempt = :attempt AND retry_key = :key"
        " AND commit_seq IS NOT NULL) WHERE attempt = :attempt AND retry_key = :key AND commit_seq IS NOT NULL",
        {"attempt": attempt, "key": retry_key},
    )


def mark_delivered(db: sqlite3.Connection, call_id: str) -> None:
    db.execute("UPDATE calls SET delivered = 1 WHERE call_id = ? AND commit_seq IS NOT NULL", (call_id,))


def _sealed(rollout_id: str, attempt_id: str) -> ConflictError:
    return ConflictError(
        f"Attempt {attempt_id} of rollout {rollout_id} is sealed: it takes no more calls.",
        "Its agent should have ended.",
    )
