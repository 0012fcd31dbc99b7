"""The clock of held time."""

from __future__ import annotations

import asyncio

from agl_runtime.controller.attempt import HeldClock
from agl_runtime.errors import GatewayError


async def nothing() -> None:
    return None


def test_held_time_adds_up_from_the_first_word_on_and_over_restarts_of_the_gateway() -> None:
    clock = HeldClock(nothing)
    for held_total_s, gateway in ((100.0, "a"), (103.0, "a"), (103.0, "a"), (2.0, "b"), (4.0, "b")):
        clock.see(held_total_s, gateway)
    assert (clock.total_s, clock.restarts) == (3.0 + 2.0 + 2.0, 1)


async def test_a_time_limit_holds_when_the_gateway_cannot_be_asked() -> None:
    async def silent() -> None:
        raise GatewayError("The gateway does not answer.")

    expired = asyncio.Event()
    await HeldClock(silent).expire(0.001, expired)
    assert expired.is_set()
