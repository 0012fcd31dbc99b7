"""Calls through the door of a rollout server."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from agl_runtime.trainer.backends.verl.cpu.door import Door


class Slow:
    """An application whose answers wait for `go`; `begun` is set by the first call."""

    def __init__(self) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.set()
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"served"})


@asynccontextmanager
async def a_call(door: Door, app: Slow) -> Any:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://server") as client:
        call = asyncio.create_task(client.get("/"))
        await asyncio.wait([call, asyncio.create_task(app.begun.wait())], return_when=asyncio.FIRST_COMPLETED)
        yield call


@pytest.mark.parametrize("state", ["asleep", "is_paused"])
async def test_no_call_enters_while_the_server_sleeps_or_is_paused(state: str):
    app = Slow()
    door = Door(app)
    app.go.set()
    setattr(door, state, True)
    async with a_call(door, app) as call:
        assert (await call).status_code == 503
    assert not app.begun.is_set()
    setattr(door, state, False)
    async with a_call(door, app) as call:
        assert (await call).text == "served"


async def test_an_abort_ends_and_counts_the_calls_inside_and_no_others():
    app = Slow()
    door = Door(app)
    door.abort()
    assert (door.aborted, door.is_empty) == (0, True)
    door.is_paused = False
    async with a_call(door, app) as call:
        assert not door.is_empty
        await asyncio.to_thread(door.abort)
        with pytest.raises(asyncio.CancelledError):
            await call
    assert (door.aborted, door.is_empty, door.is_paused) == (1, True, True)


async def test_a_call_that_is_inside_when_the_server_falls_asleep_is_served():
    app = Slow()
    door = Door(app)
    async with a_call(door, app) as call:
        door.asleep = True
        app.go.set()
        assert (await call).text == "served"
    assert (door.aborted, door.is_empty) == (0, True)
