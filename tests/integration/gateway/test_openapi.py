"""Whatever the OpenAPI document says may be sent is answered as the document says, and never by a fault of the
gateway."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fakes.fuzzing import at_home, operations
from fakes.model_server import FakeModelServer
from fakes.running_gateway import ADMIN_KEY, config, running_gateway

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SETTINGS = settings(
    max_examples=15,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = operations()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """How to call a gateway that all examples share, and where its model server is."""
    started, stop, found = threading.Event(), threading.Event(), []

    async def serve(folder: Path) -> None:
        with FakeModelServer() as model:
            async with running_gateway(folder, config(gateway={"hold_limit_s": 0.02})) as running:
                found.extend((running.url, model.url))
                started.set()
                await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve(tmp_path_factory.mktemp("openapi"))), daemon=True)
    thread.start()
    assert started.wait(20)
    with requests.Session() as session:
        yield {"base_url": found[0], "endpoint": found[1], "session": session}
    stop.set()
    thread.join(20)


def begin_anew(called: dict[str, Any], endpoint: str, rollout_id: str) -> str:
    """After whatever another route did: a rollout of its own, a model server, nothing paused."""
    rest = dict(called)
    root, session = rest.pop("base_url"), rest.pop("session")
    session.post(f"{root}/api/rollouts", json=[{"input": {}, "rollout_id": rollout_id}], **rest)
    session.post(f"{root}/api/models", json=[{"model": "policy", "endpoint": endpoint}], **rest)
    session.post(f"{root}/proxy/resume", **rest)
    return rollout_id


def test_the_document_tells_of_every_dialect() -> None:
    assert sum(label.startswith("POST /proxy/rollout") for label in OPERATIONS) == 5


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_route_keeps_to_the_document(served: dict[str, Any], label: str) -> None:
    called = {"headers": {"x-api-key": ADMIN_KEY}, "timeout": 30, **served}
    endpoint = called.pop("endpoint")
    own = begin_anew(called, endpoint, f"r{list(OPERATIONS).index(label)}")

    @SETTINGS
    @given(case=OPERATIONS[label].as_strategy())
    def ask(case: Any) -> None:
        at_home(case, endpoint, rollout_id=own, attempt_id="0", mode="train")
        case.call_and_validate(**called, checks=CHECKS)

    ask()
