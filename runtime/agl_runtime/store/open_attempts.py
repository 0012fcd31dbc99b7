"""What later calls of attempts under way may build on, remembered in memory.

Of token ids only the branches' ends are kept (a call whose prompt + sampled ids begin a later prompt is contained in
that one), of requests only those that no later one covers, and of both a bounded number: an attempt of thousands of
calls without common ground costs no more than their number. Of too many ends those go first that continue nothing, so
that a conversation keeps its end however many single questions its agent asks meanwhile.

All of it can be read from the database again: after a restart, when memory ran short, or when a transaction was given
up. It belongs to the writing connection's jobs, which change it last, when nothing of that job can fail any more.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from agl_runtime.calls import Delta, Ids, common_prefix, rebuild
from agl_runtime.store import codec

BUDGET_BYTES = 128 * 2**20
MOST_OUTLINES = 16
MOST_ENDS = 64


@dataclass(slots=True)
class OpenAttempt:
    """`ends`: committed calls that none continues, as prompt + sampled ids [P + S]; `single` are those of them that
    continue none. By call id, oldest first, as `outlines` are. `begun` and `committed` count the attempt's calls, and
    `size_bytes` is that of `ends`."""

    ends: dict[str, Ids] = field(default_factory=dict)
    single: dict[str, None] = field(default_factory=dict)
    outlines: dict[str, codec.Outline] = field(default_factory=dict)
    begun: int = 0
    committed: int = 0
    size_bytes: int = 0
    _keys: Counter[str] = field(default_factory=Counter)

    def is_retried(self, retry_key: str | None) -> bool:
        """Whether several calls have this key."""
        return retry_key is not None and self._keys[retry_key] > 1

    def match(self, prompt: Ids) -> tuple[str, int, list[str]]:
        """The end with which a prompt shares most, how much that is, and the ends that it continues."""
        shared = {call_id: common_prefix(prompt, ids) for call_id, ids in self.ends.items()}
        base_id = max(shared, key=lambda call_id: shared[call_id], default="")
        continued = [call_id for call_id, count in shared.items() if count == self.ends[call_id].size]
        return base_id, shared.get(base_id, 0), continued

    def begin(self, call_id: str, outline: codec.Outline, retry_key: str | None) -> None:
        self.begun += 1
        if retry_key is not None:
            self._keys[retry_key] += 1
        kept = {old_id: old for old_id, old in self.outlines.items() if not codec.covers(outline, old)}
        self.outlines = dict(list(kept.items())[1 - MOST_OUTLINES :]) | {call_id: outline}

    def commit(self, call_id: str, ids: Ids, continued: Collection[str]) -> None:
        """`ids` are prompt + sampled; `continued` the calls that it continues."""
        self.committed += 1
        for old_id in continued:
            self._drop(old_id)
        if ids.size:
            self.ends[call_id] = ids
            self.size_bytes += ids.nbytes
            if not continued:
                self.single[call_id] = None
        if len(self.ends) > MOST_ENDS:
            self._drop(next(iter(self.single if len(self.single) > 1 else self.ends)))

    def _drop(self, call_id: str) -> None:
        self.size_bytes -= self.ends.pop(call_id).nbytes
        self.single.pop(call_id, None)


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that may be committed: its number and its attempt's and rollout's."""

    n: int
    attempt: int
    rollout: int
    retry_key: str | None


class OpenAttempts:
    """The most recently used attempts, by their number, within `budget_bytes` of token ids.

    `places` are numbers of rollouts and attempts that take calls, by their ids, and `begun` calls that are not
    committed, by theirs: both only as long as nothing but calls is written, which may end an attempt."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._size_bytes = 0
        self._attempts: OrderedDict[int, OpenAttempt] = OrderedDict()
        self._touched: set[int] = set()
        self.places: dict[tuple[str, str], tuple[int, int]] = {}
        self.begun: dict[str, Begun] = {}

    def get(self, db: sqlite3.Connection, attempt: int) -> OpenAttempt:
        if attempt not in self._attempts:
            self._attempts[attempt] = _load(db, attempt)
            self._grow(self._attempts[attempt].size_bytes)
        self._attempts.move_to_end(attempt)
        self._touched.add(attempt)
        return self._attempts[attempt]

    def commit(self, attempt: int, call_id: str, ids: Ids, continued: Collection[str]) -> None:
        """As `OpenAttempt.commit`, of one that `get` gave."""
        known = self._attempts[attempt]
        before_bytes = known.size_bytes
        known.commit(call_id, ids, continued)
        self._grow(known.size_bytes - before_bytes)

    def forget(self, attempt: int) -> None:
        if known := self._attempts.pop(attempt, None):
            self._size_bytes -= known.size_bytes

    def doubt(self) -> None:
        """Attempts may have ended."""
        self.places.clear()
        self.begun.clear()

    def keep(self) -> None:
        """What was changed so far is committed."""
        self._touched.clear()

    def undo(self) -> None:
        """What was changed since `keep` is to be read from the database again."""
        self.doubt()
        for attempt in self._touched:
            self.forget(attempt)
        self._touched.clear()

    def _grow(self, size_bytes: int) -> None:
        self._size_bytes += size_bytes
        while self._size_bytes > self._budget_bytes and len(self._attempts) > 1:
            self.forget(next(iter(self._attempts)))


def _load(db: sqlite3.Connection, attempt: int) -> OpenAttempt:
    loaded = OpenAttempt()
    outlines: dict[str, codec.Outline] = {}
    stored = "call_id, retry_key, base_id, record FROM calls JOIN requests ON call = n"
    requests = f"SELECT {stored} WHERE attempt = ? ORDER BY n"
    for row in db.execute(requests, (attempt,)):
        outlines[row["call_id"]] = codec.outline_of(row["record"], outlines.get(row["base_id"]))
        loaded.begin(row["call_id"], outlines[row["call_id"]], row["retry_key"])
    whole: dict[str, Ids] = {}
    answers = "SELECT * FROM calls JOIN answers ON call = n WHERE attempt = ? ORDER BY commit_seq"
    for row in db.execute(answers, (attempt,)):
        prompt = rebuild(delta_of(row), whole, row["call_id"])
        ids = whole[row["call_id"]] = np.concatenate([prompt, np.frombuffer(row["sampled"], np.int32)])
        loaded.commit(row["call_id"], ids, loaded.match(prompt)[2])
    return loaded


def delta_of(row: sqlite3.Row) -> Delta:
    """The prompt in a row of `answers`."""
    return Delta(row["base_id"], row["keep"], np.frombuffer(row["tail"], np.int32), row["digest"])
