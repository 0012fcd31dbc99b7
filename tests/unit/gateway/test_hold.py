"""Holding: who waits, for how long, and what counts as in flight. The clock stands still unless moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from agl_runtime.gateway import hold as hold_module
from agl_runtime.gateway.hold import Hold
from agl_runtime.gateway.internal import CallRefused
from agl_runtime.schemas import PauseRequest


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(limit_s: float = 60.0) -> tuple[Hold, Clock]:
    clock = Clock()
    hold = Hold(limit_s, clock=clock)
    hold.set_has_model(True)
    return hold, clock


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def nothing() -> None:
    return None


async def waiting(hold: Hold, keep_alive: Callable[[], None] = nothing) -> asyncio.Task[None]:
    task = asyncio.create_task(hold.admit(keep_alive))
    await settle()
    return task


async def test_an_open_gateway_admits_at_once() -> None:
    hold, _ = opened()
    await hold.admit(nothing)
    assert hold.held_total_s == 0


async def test_a_paused_gateway_holds_until_it_resumes() -> None:
    hold, clock = opened()
    hold.pause(PauseRequest(reason="update"))
    first, second = await waiting(hold), await waiting(hold)
    assert (hold.state().held, hold.state().inflight, hold.state().reason) == (2, 0, "update")
    clock.now += 7
    assert hold.held_total_s == 7
    hold.resume()
    await asyncio.gather(first, second)
    clock.now += 50
    assert (hold.state().held, hold.held_total_s) == (0, 7)


async def test_calls_wait_for_the_first_model() -> None:
    hold = Hold(60.0)
    task = await waiting(hold)
    hold.set_has_model(True)
    await task
    hold.set_has_model(False)
    assert not hold.is_open


async def test_past_the_limit_a_call_is_refused_with_a_time_to_come_back() -> None:
    hold, clock = opened(limit_s=30)
    hold.pause(PauseRequest(retry_after_seconds=9))
    task = await waiting(hold)
    clock.now += 31
    hold.pause(PauseRequest(retry_after_seconds=9))
    with pytest.raises(CallRefused, match="weights are changing") as caught:
        await task
    assert caught.value.http_status == 429
    assert caught.value.headers() == {"retry-after": "9", "x-agl-paused": "true"}
    assert caught.value.infrastructure


async def test_without_a_model_the_refusal_says_so() -> None:
    hold = Hold(0.0)
    with pytest.raises(CallRefused, match="No model server is registered"):
        await hold.admit(nothing)


async def test_a_held_call_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_module, "KEEP_ALIVE_S", 0.0)
    hold, _ = opened()
    hold.pause(PauseRequest())
    beats: list[int] = []

    def beat() -> None:
        beats.append(1)
        if len(beats) == 3:
            hold.resume()

    await hold.admit(beat)
    assert len(beats) == 3


async def test_drained_waits_for_the_last_call_in_flight() -> None:
    hold, _ = opened()
    with hold.flight():
        hold.pause(PauseRequest())
        task = asyncio.create_task(hold.drained(10))
        await settle()
        assert not task.done()
        with hold.flight():
            assert hold.state().inflight == 2
        await settle()
        assert not task.done()
    assert (await task).inflight == 0


async def test_drained_gives_up_in_time() -> None:
    hold, _ = opened()
    with hold.flight():
        assert (await hold.drained(0)).inflight == 1


async def test_a_stopping_gateway_refuses_what_is_held() -> None:
    hold, _ = opened()
    hold.pause(PauseRequest())
    task = await waiting(hold)
    hold.close()
    with pytest.raises(CallRefused, match="gateway is stopping"):
        await task


def outlasting(hold: Hold, since: float, pause_s: float) -> asyncio.Task[bool]:
    async def call() -> bool:
        with hold.flight():
            return await hold.outlast(since, pause_s, nothing)

    return asyncio.create_task(call())


async def test_a_call_whose_server_is_away_is_held_and_not_in_flight_until_models_are_registered() -> None:
    hold, clock = opened()
    task = outlasting(hold, clock.now, 30)
    draining = asyncio.create_task(hold.drained(10))
    await settle()
    assert (hold.state().held, hold.state().inflight) == (1, 0)
    assert (await draining).inflight == 0
    clock.now += 7
    hold.pause(PauseRequest())
    hold.set_has_model(True)
    await settle()
    assert not task.done(), "a gateway that is paused holds it on"
    hold.resume()
    assert await task
    assert (hold.state().held, hold.state().inflight, hold.held_total_s) == (0, 0, 7)


async def test_a_server_that_is_away_is_asked_again_after_the_pause() -> None:
    hold, clock = opened()
    assert await outlasting(hold, clock.now, 0)


async def test_a_server_that_is_away_past_the_limit_is_given_up() -> None:
    hold, clock = opened(limit_s=30)
    assert not await outlasting(hold, clock.now - 30, 5)


async def test_a_stopping_gateway_gives_up_on_a_server_that_is_away() -> None:
    hold, clock = opened()
    task = outlasting(hold, clock.now, 30)
    await settle()
    hold.close()
    assert not await task


async def test_a_call_whose_server_stays_away_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_module, "KEEP_ALIVE_S", 0.0)
    hold, clock = opened()
    hold.pause(PauseRequest())
    with hold.flight():
        assert await hold.outlast(clock.now, 0, hold.resume)
