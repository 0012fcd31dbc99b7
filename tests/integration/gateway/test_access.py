"""Every route with every kind of key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from agl_runtime.gateway.app import create_app
from agl_runtime.gateway.auth import agent_key
from fakes.model_server import FakeModelServer
from fakes.running_gateway import ADMIN_KEY, RunningGateway, config, running_gateway

OWN = {"rollout_id": "r1", "attempt_id": "0", "mode": "train", "operation": "openai/v1/chat/completions", "name": "m"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
BASE = "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}"
PUBLIC = {("GET", "/healthz"), ("GET", f"{BASE}/anthropic/api/hello")}
MODEL_CALL = ("POST", BASE + "/{operation}")
FOR_AGENTS = {
    MODEL_CALL,
    ("GET", f"{BASE}/openai/v1/models"),
    ("GET", f"{BASE}/anthropic/v1/models"),
    ("GET", BASE + "/anthropic/v1/models/{name}"),
    ("POST", f"{BASE}/anthropic/v1/messages/count_tokens"),
    ("POST", "/api/rollouts/{rollout_id}/attempt/{attempt_id}/events"),
}


def routes() -> list[tuple[str, str]]:
    """Method and path of everything that the gateway says it serves, and of model calls, which stand before that."""
    paths = create_app(config(), None, ADMIN_KEY).openapi()["paths"]  # type: ignore[arg-type]
    return sorted([MODEL_CALL, *((method.upper(), path) for path, methods in paths.items() for method in methods)])


KEYS = {
    "none": None,
    "wrong": "agl-admin-wrong",
    "forged": agent_key("another admin key", "r1", "0", "train"),
    "own": agent_key(ADMIN_KEY, "r1", "0", "train"),
    "other rollout": agent_key(ADMIN_KEY, "r2", "0", "train"),
    "other attempt": agent_key(ADMIN_KEY, "r1", "1", "train"),
    "other mode": agent_key(ADMIN_KEY, "r1", "0", "val"),
}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    with FakeModelServer() as model:
        async with running_gateway(tmp_path) as running:
            running.register(model.url)
            for name in ("r1", "r2"):
                await running.add(name)
            yield running


async def request(gateway: RunningGateway, method: str, path: str, key: str | None, header: str) -> httpx.Response:
    value = {"authorization": f"Bearer {key}", "x-api-key": key or ""}[header]
    body = {"event_type": "note"} if path.endswith("/events") else BODY
    async with httpx.AsyncClient(base_url=gateway.url, headers={header: value} if key else {}, timeout=20) as http:
        return await http.request(method, path.format(**OWN), json=body if method == "POST" else None)


def expected(method: str, path: str, key: str) -> tuple[int, ...]:
    """The statuses that a refusal may have; empty where the request must be let in."""
    if (method, path) in PUBLIC:
        return ()
    if key in ("none", "wrong", "forged"):
        return (401,)
    if (method, path) not in FOR_AGENTS:
        return (403,)
    # An event's path names no mode, so both keys of the attempt may post it.
    return () if key == "own" or (key == "other mode" and path.endswith("/events")) else (403,)


def test_the_walk_knows_every_route() -> None:
    found = routes()
    assert set(found) >= FOR_AGENTS | PUBLIC
    assert len(found) > 25


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_every_route_with_every_kind_of_key(gateway: RunningGateway, header: str) -> None:
    for method, path in routes():
        for name, key in KEYS.items():
            refusals = expected(method, path, name)
            response = await request(gateway, method, path, key, header)
            where = f"{method} {path} with key {name}: {response.status_code} {response.text[:200]}"
            if not refusals:
                assert response.status_code < 400, where
                continue
            assert response.status_code in refusals, where
            body = response.json()
            sentence = body["error"]["message"] if path.startswith("/proxy/rollout") else body["detail"]
            assert sentence.endswith("."), where
            assert key is None or key not in response.text, where


async def test_after_sealing_an_agents_key_opens_nothing_but_the_admins_does(gateway: RunningGateway) -> None:
    await gateway.http.post("/api/rollouts/r1/attempt/0/seal")
    key = KEYS["own"]
    events = "/api/rollouts/r1/attempt/0/events"
    assert (await request(gateway, "POST", events, key, "x-api-key")).status_code == 409
    chat = f"{gateway.base()}/chat/completions"
    async with httpx.AsyncClient(headers={"x-api-key": key or ""}) as http:
        assert (await http.post(chat, json=BODY)).status_code == 409
    reward = {"event_type": "reward", "data": {"value": 1}}
    assert (await gateway.http.post(events, json=reward)).status_code == 200


async def post_reward(gateway: RunningGateway, rollout_id: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {gateway.key(rollout_id)}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as http:
        url = f"/api/rollouts/{rollout_id}/attempt/0/events"
        return await http.post(url, json={"event_type": "reward", "data": {"value": 1}})


async def test_an_agent_posts_a_reward_only_where_it_was_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_gateway(tmp_path) as gateway:
        await gateway.add("plain")
        await gateway.add("v1-local", config={"local": {"agent_class": "a:B"}})
        await gateway.add("v1-k8s", config={"k8s": {"job_template": "job.yaml"}})
        refused = await post_reward(gateway, "plain")
        assert refused.status_code == 403
        assert "agent.reports_reward" in refused.json()["detail"]
        for name in ("v1-local", "v1-k8s"):
            assert (await post_reward(gateway, name)).status_code == 200
            assert f"rollout {name}: its agent reports its own reward" in caplog.text
    other = tmp_path / "other"
    other.mkdir()
    async with running_gateway(other, config(agent={"command": "true", "reports_reward": True})) as gateway:
        await gateway.add("plain")
        assert (await post_reward(gateway, "plain")).status_code == 200


async def test_no_key_appears_in_logs_events_or_metrics(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    await gateway.http.post(f"{gateway.base()}/chat/completions", json=BODY)
    texts = [caplog.text, repr(gateway.gateway)]
    for path in ("/metrics", "/api/rollouts/r1/events", "/api/parts", "/api/rollouts/r1"):
        texts.append((await gateway.http.get(path)).text)
    for secret in (ADMIN_KEY, KEYS["own"]):
        assert not any(secret in text for text in texts if secret)


async def in_pieces(size_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(size_bytes // 2**20):
        yield b" " * 2**20
    yield b"{}"


async def test_a_model_call_over_32_mib_is_refused_in_openais_shape(gateway: RunningGateway) -> None:
    path = f"{gateway.base()}/chat/completions"
    response = await gateway.http.post(path, content=in_pieces(32 * 2**20))
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (413, "invalid_request_error")
    assert error["message"] == "The request's body is larger than 32 MiB. Send a shorter conversation."
    assert (await gateway.http.post(path, content=in_pieces(31 * 2**20))).status_code == 400
    assert await gateway.calls() == []


@pytest.mark.parametrize(("path", "most"), [("/api/rollouts/r1/attempt/0/events", 4), ("/api/rollouts", 32)])
async def test_a_control_body_over_its_limit_is_refused(gateway: RunningGateway, path: str, most: int) -> None:
    headers = {"Content-Type": "application/json"}
    refused = await gateway.http.post(path, content=in_pieces(most * 2**20), headers=headers)
    assert (refused.status_code, refused.json()) == (413, {"detail": f"The request's body is larger than {most} MiB."})
    fits = await gateway.http.post(path, content=in_pieces((most - 1) * 2**20), headers=headers)
    assert fits.status_code == 422
