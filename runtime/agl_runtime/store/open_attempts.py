"""What later calls of attempts under way may build on, remembered in memory.

Of token ids only the branches' ends are kept (a call whose prompt + sampled ids begin a later prompt is contained in
that one), of requests only those that no later one covers. All of it can be read from the database again: after a
restart, when memory ran short, or when a transaction was given up. It belongs to the writing thread, which changes it
last in a job, when nothing of that job can fail any more.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from agl_runtime.calls import Delta, Ids, rebuild
from agl_runtime.store import codec

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
        kept = {old_id: old for old_id, old in self.outlines.items() if not codec.covers(outline, old)}
        self.outlines = dict(list(kept.items())[1 - MOST_OUTLINES :]) | {call_id: outline}


class OpenAttempts:
    """The most recently used attempts, by their number, within `budget_bytes` of token ids."""

    def __init__(self, budget_bytes: int) -> None:
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
    requests = "SELECT call_id, base_id, record FROM calls JOIN requests ON call = n WHERE attempt = ? ORDER BY n"
    for row in db.execute(requests, (attempt,)):
        outlines[row["call_id"]] = codec.outline_of(row["record"], outlines.get(row["base_id"]))
        loaded.add_outline(row["call_id"], outlines[row["call_id"]])
    whole: dict[str, Ids] = {}
    answers = "SELECT * FROM calls JOIN answers ON call = n WHERE attempt = ? ORDER BY commit_seq"
    for row in db.execute(answers, (attempt,)):
        prompt = rebuild(delta_of(row), whole, row["call_id"])
        ids = whole[row["call_id"]] = np.concatenate([prompt, np.frombuffer(row["sampled"], np.int32)])
        if ids.size and not row["continued"]:
            loaded.ends[row["call_id"]] = ids
    return loaded


def delta_of(row: sqlite3.Row) -> Delta:
    """The prompt in a row of `answers`."""
    return Delta(row["base_id"], row["keep"], np.frombuffer(row["tail"], np.int32), row["digest"])
