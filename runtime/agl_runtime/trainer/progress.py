"""What the trainer says of itself while it works, about every second and at every change of phase."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from agl_runtime.client import GatewayClient
from agl_runtime.schemas import PartStatus

REPORT_EVERY_S = 1.0


class Progress:
    """Counts towards the present batch or validation. `detail` holds what does not change by itself."""

    def __init__(self, **detail: Any) -> None:
        self.phase = "starting"
        self.detail: dict[str, Any] = detail
        self._unit = "groups"
        self._done = 0
        self._total = 0
        self._tokens = 0
        self._since = time.monotonic()
        self._changed = asyncio.Event()

    def enter(self, phase: str, total: int = 0, unit: str = "groups") -> None:
        """A new phase begins, which waits for `total` things."""
        self.phase, self._unit = phase, unit
        self._done, self._total, self._tokens = 0, total, 0
        self._since = time.monotonic()
        self._changed.set()

    def sampling(self, ready: int, batch: int) -> None:
        """`ready` of the `batch` groups of the next update have come."""
        if self.phase != "sampling":
            self.enter("sampling", batch)
        self._done = ready

    def finished(self) -> None:
        """One of the things waited for has come."""
        self._done += 1

    def sampled(self, tokens: int) -> None:
        self._tokens += tokens

    def status(self) -> PartStatus:
        waits = self.phase in ("sampling", "validating") and self._done < self._total
        seconds = time.monotonic() - self._since
        rate = {"tokens_per_s": round(self._tokens / seconds, 1)} if self._tokens and seconds > 0 else {}
        groups = {"groups_done": self._done, "groups_total": self._total}
        return PartStatus(
            part="trainer",
            pid=os.getpid(),
            state=self.phase,
            waiting_for=f"{self._total - self._done} of {self._total} {self._unit}" if waits else None,
            detail={**self.detail, **groups, **rate, "phase": self.phase},
        )

    async def report(self, client: GatewayClient, gateway_began_anew: Callable[[], Awaitable[None]]) -> NoReturn:
        """For ever. A gateway that knows this trainer no more has begun anew since the last report."""
        while True:
            if not any(part.part == "trainer" and part.pid == os.getpid() for part in await client.parts()):
                await gateway_began_anew()
            await client.report(self.status())
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):  # Python 3.11's wait_for can swallow a cancellation
                    await self._changed.wait()
