"""Waking waiting requests, and the change stream's recent past."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Literal

from agl_runtime.schemas import Change

ChangeKind = Literal["rollout", "models", "proxy", "part", "checkpoint"]
KEPT_CHANGES = 4096


class Signal:
    """Counts how often it fired. A waiter names the count that it has seen, so that no firing is missed."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        self.count += 1
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, seen: int, timeout_s: float | None = None) -> bool:
        """True as soon as it has fired since `seen`; False after `timeout_s` (never, when None)."""
        if self.count > seen:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            if timeout_s is None:
                await future
            else:
                async with asyncio.timeout(timeout_s):
                    await future
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)
        return True


class Changes:
    """A ring of the newest changes. `seq` begins at 1 with each start of the gateway."""

    def __init__(self) -> None:
        self.moved = Signal()
        self._seq = 0
        self._ring: deque[Change] = deque(maxlen=KEPT_CHANGES)

    def emit(self, kind: ChangeKind, data: dict[str, Any]) -> None:
        self._seq += 1
        self._ring.append(Change(seq=self._seq, kind=kind, data=data))
        self.moved.fire()

    def start_after(self, after: int) -> int:
        """Where a reader goes on that has seen `after`: at the beginning, if that was before a restart."""
        return after if after <= self._seq else 0

    def since(self, after: int) -> list[Change]:
        """What came after `after` and is still kept."""
        behind = min(self._seq - after, len(self._ring))
        return [self._ring[i] for i in range(len(self._ring) - behind, len(self._ring))]
