"""One real vLLM server for all of these tests, behind a gateway of each test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fakes.running_gateway import RunningGateway, config, running_gateway
from fakes.vllm import VllmServer, vllm_server


@pytest.fixture(scope="package")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with vllm_server(tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture
def temperature() -> float:
    return 0.7


@pytest.fixture
async def gateway(tmp_path: Path, vllm: VllmServer, temperature: float) -> AsyncIterator[RunningGateway]:
    """Rollout r1 is in it, and vLLM is registered as version 1.1."""
    settings = config(train={"temperature": temperature}, gateway={"upstream_retries": 0})
    async with running_gateway(tmp_path, settings) as running:
        running.register(vllm.url, version=1, run_epoch=1)
        await running.add()
        yield running
