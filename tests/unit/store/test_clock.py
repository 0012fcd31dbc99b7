"""The wall clock is set, forwards or back, while rollouts are leased: leases go on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_runtime.schemas import RolloutCreate
from agl_runtime.store.sqlite import SqliteStore
from fakes.recorded import Clock

HOUR_S = 3600.0


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
async def test_a_lease_is_as_long_as_it_was_when_the_wall_clock_is_set(tmp_path: Path, jump_s: float) -> None:
    wall, steady = Clock(), Clock()
    store = SqliteStore(tmp_path / "store.sqlite3", clock=wall, steady=steady)
    await store.open()
    await store.add_rollouts([RolloutCreate(input={"q": 1}, rollout_id="r")])
    assert len(await store.claim("one", 1, 30.0)) == 1
    wall.now_s += jump_s
    assert await store.claim("two", 1, 30.0) == []
    assert await store.renew("one", ["r"], 30.0) == []
    steady.now_s += 31
    assert [attempt for _, attempt in await store.claim("two", 1, 30.0)] == ["1"]
    await store.close()


async def test_leases_of_an_earlier_process_run_out_in_this_one(tmp_path: Path) -> None:
    wall = Clock()
    for controller, granted in (("one", 1), ("two", 0), ("three", 1)):
        store = SqliteStore(tmp_path / "store.sqlite3", clock=wall)
        await store.open()
        await store.add_rollouts([RolloutCreate(input={"q": 1}, rollout_id="r")])
        assert len(await store.claim(controller, 1, HOUR_S)) == granted
        await store.close()
        wall.now_s += 0.6 * HOUR_S
