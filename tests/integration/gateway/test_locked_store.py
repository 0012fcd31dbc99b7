"""The store of a running gateway, locked by another program: nothing freezes, and calls go on when it is free."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_runtime.store import database
from fakes.model_server import FakeModelServer
from fakes.running_gateway import RunningGateway, running_gateway


@pytest.fixture
def patience_s() -> float:
    return 30.0


@pytest.fixture
async def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> AsyncIterator[RunningGateway]:
    """Its writer waits `patience_s` for a locked store."""
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", patience_s)
    with FakeModelServer() as model:
        async with running_gateway(tmp_path) as running:
            running.register(model.url)
            await running.add()
            yield running


@pytest.fixture
def other(gateway: RunningGateway, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Another program, which has the store locked."""
    db = sqlite3.connect(tmp_path / "store.sqlite3", isolation_level=None)
    db.execute("BEGIN IMMEDIATE")
    yield db
    db.close()


async def call(gateway: RunningGateway) -> httpx.Response:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    return await gateway.http.post(f"{gateway.base()}/chat/completions", json=body)


async def test_a_locked_store_delays_its_calls_and_nothing_else(
    gateway: RunningGateway, other: sqlite3.Connection
) -> None:
    waiting = asyncio.create_task(call(gateway))
    while not gateway.gateway.attempts.all_running():
        await gateway.http.get("/healthz")
    assert (await gateway.http.get("/api/rollouts/r1")).status_code == 200
    assert not waiting.done()
    other.execute("ROLLBACK")
    assert (await waiting).status_code == 200


@pytest.mark.parametrize("patience_s", [0.0])
async def test_a_store_that_stays_locked_fails_its_calls_by_name(
    gateway: RunningGateway, other: sqlite3.Connection
) -> None:
    response = await call(gateway)
    assert response.status_code == 503
    assert "Another program has the store" in response.text
    other.execute("ROLLBACK")
    assert (await call(gateway)).status_code == 200
