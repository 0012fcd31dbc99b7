"""How the store's methods reach the database: written as functions of a transaction's connection, awaited without it.

@write
def seal(self, db, rollout_id, attempt_id): ...      # within a transaction of the writing connection

await store.seal(rollout_id, attempt_id)             # returns when that transaction is committed
"""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from agl_runtime.errors import StoreError
from agl_runtime.store.open_attempts import OpenAttempts
from agl_runtime.store.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Tables")


class Tables:
    """What the parts of the store share. Only jobs of the writing connection touch `_opened`."""

    def __init__(self, path: Path, clock: Callable[[], float], steady: Callable[[], float], budget_bytes: int) -> None:
        self._path = path
        self._clock = clock
        self._steady = steady
        self._opened = OpenAttempts(budget_bytes)
        self._writer: Worker | None = None
        self._reader: Worker | None = None

    def _running(self, worker: Worker | None) -> Worker:
        if worker is None:
            raise StoreError(f"The store {self._path} is not open.", "Open it first.")
        return worker


Method = Callable[Concatenate[S, sqlite3.Connection, P], T]
Awaited = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]


def write(method: Method[S, P, T]) -> Awaited[S, P, T]:
    @functools.wraps(method)
    def doubting(self: S, db: sqlite3.Connection, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._opened.doubt()
        return method(self, db, *args, **kwargs)

    return _awaited(doubting, lambda self: self._writer, lambda *_, **__: False)


def write_at_once(is_short: Callable[..., bool]) -> Callable[[Method[S, P, T]], Awaited[S, P, T]]:
    """A `write` that ends no attempt, and with arguments that are `is_short` takes less time than handing it to a
    thread would: then it may be done in the event loop."""

    def decorate(method: Method[S, P, T]) -> Awaited[S, P, T]:
        return _awaited(method, lambda self: self._writer, is_short)

    return decorate


def read(method: Method[S, P, T]) -> Awaited[S, P, T]:
    return _awaited(method, lambda self: self._reader, lambda *_, **__: False)


def read_at_once(method: Method[S, P, T]) -> Awaited[S, P, T]:
    """A `read` that takes so little time that it may be done in the event loop."""
    return _awaited(method, lambda self: self._reader, lambda *_, **__: True)


def _awaited(
    method: Method[S, P, T], worker: Callable[[S], Worker | None], is_short: Callable[..., bool]
) -> Awaited[S, P, T]:
    @functools.wraps(method)
    async def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        running = self._running(worker(self))
        return await running.run(lambda db: method(self, db, *args, **kwargs), is_short=is_short(*args, **kwargs))

    return run
