"""A gateway and a model server that are introduced to each other; failed tries follow each other without a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fakes.model_server import FakeModelServer
from fakes.running_gateway import RunningGateway, config, running_gateway


@pytest.fixture
def model() -> Iterator[FakeModelServer]:
    with FakeModelServer() as server:
        yield server


@pytest.fixture
async def gateway(tmp_path: Path, model: FakeModelServer) -> AsyncIterator[RunningGateway]:
    """Rollout r1 is in it, and the policy is registered as version 1.3."""
    async with running_gateway(tmp_path, config(gateway={"max_pending_mb": 64, "upstream_retries": 3})) as running:
        running.gateway.upstream.pause = lambda _: asyncio.sleep(0)
        running.register(model.url, version=3, run_epoch=1)
        await running.add()
        yield running
