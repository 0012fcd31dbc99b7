"""What every route is given: the gateway's state and whose key the request carried."""

from __future__ import annotations

import time
from typing import Annotated, cast

from fastapi import Depends, Query, Request

from agl_runtime.gateway.auth import Caller
from agl_runtime.gateway.changes import Signal
from agl_runtime.gateway.recorder import Refusing, sealed
from agl_runtime.gateway.state import Gateway


# Coroutines, because FastAPI sends plain functions through a thread, which costs more than most requests do.
async def _gateway(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


async def _caller(request: Request) -> Caller:
    return cast(Caller, request.state.caller)


async def _not_revoked(rollout_id: str, attempt_id: str, request: Request) -> None:
    """Raises CallRefused for an agent's key whose attempt has ended."""
    caller: Caller | None = request.state.caller
    if caller is not None and caller.role == "agent":
        with Refusing(attempt_id):
            attempt = await (await _gateway(request)).attempts.get(rollout_id, attempt_id)
        if attempt.is_closed:
            raise sealed(attempt_id)


LONGEST_WAIT_S = 60.0
# What a cursor or a limit, and a long-poll, may be.
Count = Annotated[int, Query(ge=-(2**53), le=2**53)]
Seconds = Annotated[float, Query(ge=0)]
State = Annotated[Gateway, Depends(_gateway)]
Who = Annotated[Caller, Depends(_caller)]
NotRevoked = Depends(_not_revoked)


class Patience:
    """How long a long-poll may still wait."""

    def __init__(self, wait_s: float) -> None:
        self._until = time.monotonic() + min(wait_s, LONGEST_WAIT_S)

    async def more(self, gateway: Gateway, signal: Signal, seen: int, at_most_s: float | None = None) -> bool:
        """Wait for `signal`; False when there is no time left or the gateway stops."""
        left_s = self._until - time.monotonic()
        if left_s <= 0 or gateway.is_stopping:
            return False
        await signal.wait(seen, left_s if at_most_s is None else min(left_s, at_most_s))
        return True
