"""How much may be on its way through the gateway at once; what comes beyond is shed, and harnesses wait that out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agl_runtime.gateway.bodies import MODEL_CALL_BYTES
from agl_runtime.gateway.internal import CallRefused
from agl_runtime.gateway.metrics import Metrics

LEAST_BYTES = 64 * 2**10  # what a call of any size takes
RETRY_AFTER_S = 5


@dataclass
class Load:
    """Counts the bodies of model calls that are read, held or served, in `metrics`."""

    limit_bytes: int
    metrics: Metrics

    @contextmanager
    def carry(self, told: str | None) -> Iterator[None]:
        """For the time of one call, with the length that its head tells; one without counts as the longest. Raises
        CallRefused, before the body is read, where it does not fit beside the others."""
        told_bytes = int(told) if told and told.isdecimal() else MODEL_CALL_BYTES
        size_bytes = min(max(told_bytes, LEAST_BYTES), MODEL_CALL_BYTES)
        if self.metrics.pending_bytes + size_bytes > self.limit_bytes:
            self.metrics.shed += 1
            raise CallRefused(
                f"Calls of {self.limit_bytes // 2**20} MB are on their way already, as many as gateway.max_pending_mb "
                "allows.",
                "Call again after the time that Retry-After names.",
                http_status=429,
                retry_after_s=RETRY_AFTER_S,
                infrastructure=True,
            )
        self.metrics.pending_bytes += size_bytes
        try:
            yield
        finally:
            self.metrics.pending_bytes -= size_bytes
