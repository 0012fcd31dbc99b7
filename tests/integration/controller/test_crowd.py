"""A thousand rollouts queued at once: all of them run, as few at a time as configured, and a claim costs no more."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from agl_runtime.client import GatewayClient
from agl_runtime.controller.attempt import Settings
from agl_runtime.controller.loop import Controller
from agl_runtime.schemas import RolloutCreate, RolloutState
from agl_runtime.store import attempts
from agl_runtime.store.sqlite import SqliteStore
from fakes.runner import FakeRunner
from fakes.running_gateway import ADMIN_KEY, running_gateway

COUNT, AT_ONCE = 1000, 32


def queued() -> list[RolloutCreate]:
    return [RolloutCreate(input={"q": n}, rollout_id=f"r{n}") for n in range(COUNT)]


async def test_a_thousand_queued_rollouts_all_run_once_and_no_more_at_once_than_configured(tmp_path: Path) -> None:
    runner, stop = FakeRunner(), asyncio.Event()
    settings = Settings(controller_id="c", limit=AT_ONCE, attempts=1, timeout_s=60.0)
    async with running_gateway(tmp_path) as gateway, GatewayClient(gateway.url, ADMIN_KEY) as client:
        await client.add_rollouts(queued())
        running = asyncio.create_task(Controller(client, runner, None, settings).run(stop))  # type: ignore[arg-type]
        after = 0
        async with asyncio.timeout(300):
            while after < COUNT:
                after = (await client.terminal(after, limit=COUNT, wait_s=20)).next_after
        stop.set()
        await running
        rollouts = await client.rollouts(limit=2 * COUNT)
    assert Counter(rollout.status.state for rollout in rollouts) == {RolloutState.SUCCEEDED: COUNT}
    assert sorted(runner.started) == sorted((f"r{n}", "0") for n in range(COUNT))
    assert runner.most_at_once <= AT_ONCE


async def test_a_claim_costs_as_many_statements_with_a_thousand_in_the_queue_as_with_few(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite3")
    await store.open()
    assert store._writer is not None
    statements: list[str] = []
    store._writer._db.set_trace_callback(statements.append)
    costs: list[int] = []
    await store.add_rollouts(queued())
    while True:
        statements.clear()
        granted = await store.claim("c", 8, 30.0)
        if len(granted) < 8:
            break
        costs.append(sum(not statement.startswith("PRAGMA") for statement in statements))  # its log is copied at times
        for rollout, _ in granted:
            await store.delete_rollout(rollout.rollout_id)
    assert len(costs) == COUNT // 8
    assert set(costs) == {costs[0]}
    plan = f"EXPLAIN QUERY PLAN SELECT n FROM rollouts WHERE {attempts._CLAIMABLE} ORDER BY n LIMIT 8"
    named = {"controller": "c", "now": 0.0, "held": "[]"}
    steps = await store._writer.run(lambda db: [row["detail"] for row in db.execute(plan, named)])
    assert [step for step in steps if "rollouts" in step and "INDEX" not in step] == []
    await store.close()
