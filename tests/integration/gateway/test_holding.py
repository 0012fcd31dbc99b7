"""Pausing while weights change, over real HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agl_runtime.client import GatewayClient
from agl_runtime.gateway import hold as hold_module
from agl_runtime.schemas import LeaseRenewal
from fakes.model_server import Answer, FakeModelServer
from fakes.running_gateway import ADMIN_KEY, RunningGateway, config, running_gateway

USER: Any = {"role": "user", "content": "x"}
BODY = {"model": "m", "messages": [USER]}


async def held(gateway: RunningGateway, count: int) -> None:
    async with asyncio.timeout(20):
        while (await gateway.http.get("/proxy/state")).json()["held"] != count:
            await asyncio.sleep(0.01)


async def test_an_agent_without_retries_notices_nothing_of_a_pause(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    async with GatewayClient(gateway.url, ADMIN_KEY) as trainer:
        await trainer.pause("update")
        task = asyncio.create_task(client.chat.completions.create(model="m", messages=[USER]))
        await held(gateway, 1)
        assert model.requests == []
        state = await trainer.proxy_state(drained_wait_s=5)
        assert (state.inflight, state.held) == (0, 1)
        assert (await gateway.store.calls("r1")) == []
        gateway.register(model.url, version=4, run_epoch=1)
        await trainer.resume()
        assert (await task).choices[0].message.content == "ok"
        renewed = await trainer.renew(LeaseRenewal(controller_id="c", rollout_ids=[]))
        assert renewed.held_total_s > 0
    (call,) = await gateway.store.calls("r1")
    assert call.packed is not None
    assert str(call.packed.spans[0].version) == "1.4"


async def test_a_pause_waits_for_calls_in_flight_until_they_are_on_record(
    gateway: RunningGateway, model: FakeModelServer
) -> None:
    model.script = [Answer(gated=True)]
    task = asyncio.create_task(gateway.http.post(f"{gateway.base()}/chat/completions", json=BODY))
    await asyncio.to_thread(model.wait_for, lambda server: len(server.requests) == 1)
    async with GatewayClient(gateway.url, ADMIN_KEY) as trainer:
        assert (await trainer.pause("update")).inflight == 1
        assert (await trainer.proxy_state()).inflight == 1
        draining = asyncio.create_task(trainer.proxy_state(drained_wait_s=20))
        model.release()
        assert (await draining).inflight == 0
        (call,) = await gateway.store.calls("r1")
        assert call.info.committed
    assert (await task).status_code == 200


async def test_past_the_limit_a_call_gets_429_and_a_stream_that_has_begun_an_error_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_gateway(tmp_path, config(gateway={"hold_limit_s": 0.05})) as gateway:
        await gateway.add()
        url = f"{gateway.base()}/chat/completions"
        response = await gateway.http.post(url, json=BODY)
        assert (response.status_code, response.headers["retry-after"]) == (429, "5")
        assert response.headers["x-agl-paused"] == "true"
        assert response.json()["error"]["message"].startswith("No model server is registered")
        monkeypatch.setattr(hold_module, "KEEP_ALIVE_S", 0.01)
        stream = await gateway.http.post(url, json={**BODY, "stream": True})
        assert stream.status_code == 200
        assert stream.text.startswith(": keep-alive\n\n")
        assert '"code":"gateway_paused"' in stream.text
        events = await gateway.store.events("r1")
        assert [event.event_type for event in events] == ["upstream_failure"] * 2
        assert await gateway.store.calls("r1") == []


async def test_held_calls_of_a_sealed_attempt_end(gateway: RunningGateway) -> None:
    await gateway.http.post("/proxy/pause", json={})
    task = asyncio.create_task(gateway.http.post(f"{gateway.base()}/chat/completions", json=BODY))
    await held(gateway, 1)
    await gateway.http.post("/api/rollouts/r1/attempt/0/seal")
    assert (await task).status_code == 409
    await held(gateway, 0)


async def test_a_held_harness_that_leaves_leaves_nothing(gateway: RunningGateway) -> None:
    await gateway.http.post("/proxy/pause", json={})
    with pytest.raises(httpx.ReadTimeout):
        await gateway.http.post(f"{gateway.base()}/chat/completions", json=BODY, timeout=0.2)
    await held(gateway, 0)
    await gateway.http.post("/proxy/resume")
    assert await gateway.store.calls("r1") == []
