"""Looks after verl's rollout servers. When one dies nobody else notices, and calls would be held for it in vain."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from agl_runtime.errors import TrainerError

CHECK_S = 5.0
REFUSALS = 3
"""A server that refuses so many connections in a row is gone."""


async def watch(addresses: Sequence[str]) -> NoReturn:
    """For ever; `addresses` are host:port. Raises TrainerError when one is gone."""
    refused: Counter[str] = Counter()
    while True:
        await asyncio.sleep(CHECK_S)
        for address in addresses:
            refused[address] = 0 if await _answers(address) else refused[address] + 1
            if refused[address] >= REFUSALS:
                raise TrainerError(f"verl's rollout server at {address} is gone.", "See `agl logs trainer`.")


async def _answers(address: str) -> bool:
    """Whether something listens there; what is only busy does."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CHECK_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return True
    except OSError:
        return False
    writer.close()
    return True
