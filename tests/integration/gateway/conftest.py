"""A gateway and a model server that are already introduced to each other, and the official client between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import openai
import pytest

from fakes.model_server import FakeModelServer
from fakes.running_gateway import RunningGateway, config, running_gateway

Client = Callable[..., openai.AsyncOpenAI]


@pytest.fixture
def model() -> Iterator[FakeModelServer]:
    with FakeModelServer() as server:
        yield server


@pytest.fixture
async def gateway(tmp_path: Path, model: FakeModelServer) -> AsyncIterator[RunningGateway]:
    """Rollout r1 is in it, and the policy is registered as version 1.3."""
    async with running_gateway(tmp_path, config(gateway={"upstream_retries": 0})) as running:
        running.register(model.url, version=3, run_epoch=1)
        await running.add()
        yield running


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    """As the agent of r1 has it, without retries."""
    async with openai.AsyncOpenAI(base_url=gateway.base(), api_key=gateway.key(), max_retries=0) as made:
        yield made
