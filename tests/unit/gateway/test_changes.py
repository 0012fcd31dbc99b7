from __future__ import annotations

import asyncio

from agl_runtime.gateway.changes import KEPT_CHANGES, Changes, Signal


async def test_a_firing_before_the_wait_is_not_missed() -> None:
    signal = Signal()
    seen = signal.count
    signal.fire()
    assert await signal.wait(seen, 0.0)


async def test_a_waiter_is_woken() -> None:
    signal = Signal()
    task = asyncio.create_task(signal.wait(signal.count))
    await asyncio.sleep(0)
    signal.fire()
    assert await task


async def test_a_waiter_that_was_cancelled_is_left_alone() -> None:
    signal = Signal()
    gone, there = (asyncio.create_task(signal.wait(signal.count)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    signal.fire()
    assert await there
    assert (await asyncio.wait([gone]))[0].pop().cancelled()


async def test_without_a_firing_the_wait_ends_in_time() -> None:
    signal = Signal()
    assert not await signal.wait(signal.count, 0.0)


async def test_changes_are_numbered_and_read_from_any_point() -> None:
    changes = Changes()
    for number in range(3):
        changes.emit("part", {"n": number})
    assert [change.seq for change in changes.since(0)] == [1, 2, 3]
    assert [change.data["n"] for change in changes.since(2)] == [2]
    assert changes.since(3) == []


async def test_only_the_newest_are_kept() -> None:
    changes = Changes()
    for number in range(KEPT_CHANGES + 5):
        changes.emit("part", {"n": number})
    kept = changes.since(0)
    assert (len(kept), kept[0].seq) == (KEPT_CHANGES, 6)


async def test_a_reader_from_before_a_restart_begins_anew() -> None:
    changes = Changes()
    changes.emit("part", {})
    assert changes.start_after(1) == 1
    assert changes.start_after(900) == 0
