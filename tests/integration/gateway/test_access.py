"""Every route with every kind of key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_runtime.gateway.app import ROUTERS
from agl_runtime.gateway.auth import agent_key
from agl_runtime.gateway.dialects import all_dialects
from fakes.model_server import FakeModelServer
from fakes.running_gateway import ADMIN_KEY, RunningGateway, config, running_gateway

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
BODIES = {"/events": {"event_type": "note"}, "/completions": {**BODY, "prompt": "x"}, "/responses": {"input": "x"}}
BASE = "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}"
# Who may use each route: everyone, an agent below its own path, or the administrator alone.
ANYONE, AGENT, ADMIN = "anyone", "agent", "admin"
MAY = {
    "GET /healthz": ANYONE,
    "GET /openapi.json": ANYONE,
    f"GET {BASE}/anthropic/api/hello": ANYONE,
    f"HEAD {BASE}/anthropic/api/hello": ANYONE,
    f"POST {BASE}/openai/v1/chat/completions": AGENT,
    f"POST {BASE}/openai/v1/completions": AGENT,
    f"POST {BASE}/openai/v1/responses": AGENT,
    f"GET {BASE}/openai/v1/responses": AGENT,
    f"GET {BASE}/openai/v1/models": AGENT,
    f"POST {BASE}/anthropic/v1/messages": AGENT,
    f"POST {BASE}/anthropic/v1/messages/count_tokens": AGENT,
    f"GET {BASE}/anthropic/v1/models": AGENT,
    f"GET {BASE}/anthropic/v1/models/{{name:path}}": AGENT,
    "POST /api/rollouts/{rollout_id}/attempt/{attempt_id}/events": AGENT,
    "GET /api/changes": ADMIN,
    "GET /api/checkpoints": ADMIN,
    "POST /api/checkpoints": ADMIN,
    "POST /api/claims": ADMIN,
    "POST /api/claims/renew": ADMIN,
    "GET /api/counts": ADMIN,
    "DELETE /api/models": ADMIN,
    "GET /api/models": ADMIN,
    "POST /api/models": ADMIN,
    "GET /api/parts": ADMIN,
    "POST /api/parts": ADMIN,
    "GET /api/rollouts": ADMIN,
    "POST /api/rollouts": ADMIN,
    "GET /api/rollouts/terminal": ADMIN,
    "DELETE /api/rollouts/{rollout_id}": ADMIN,
    "GET /api/rollouts/{rollout_id}": ADMIN,
    "PATCH /api/rollouts/{rollout_id}": ADMIN,
    "POST /api/rollouts/{rollout_id}/attempt": ADMIN,
    "POST /api/rollouts/{rollout_id}/attempt/{attempt_id}/end": ADMIN,
    "POST /api/rollouts/{rollout_id}/attempt/{attempt_id}/seal": ADMIN,
    "GET /api/rollouts/{rollout_id}/calls": ADMIN,
    "GET /api/rollouts/{rollout_id}/events": ADMIN,
    "GET /metrics": ADMIN,
    "POST /proxy/pause": ADMIN,
    "POST /proxy/resume": ADMIN,
    "GET /proxy/state": ADMIN,
}


def served() -> set[str]:
    """Every method and path: of the routers, of the document, and of the dialects, which stand before those."""
    routes = [route for router in ROUTERS for route in router.routes]
    dialects = {f"POST {BASE}/{path}" for path in all_dialects()}
    return dialects | {"GET /openapi.json"} | {f"{method} {r.path}" for r in routes for method in r.methods}  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Holder:
    """Somebody with a key, and the rollout whose paths are asked with it."""

    key: str | None
    refused: int | None
    """The status with which an agent's routes refuse it; None where they let it in."""
    rollout_id: str = "r1"
    mode: str = "train"


def key_of(*names: Any, admin: str = ADMIN_KEY) -> str:
    return agent_key(admin, *names)


HOLDERS = {
    "none": Holder(None, 401),
    "wrong": Holder("agl-admin-wrong", 401),
    "forged": Holder(key_of("r1", "0", "train", admin="another admin key"), 401),
    "agent train": Holder(key_of("r1", "0", "train"), None),
    "agent val": Holder(key_of("v1", "0", "val"), None, "v1", "val"),
    "revoked": Holder(key_of("over", "0", "train"), 409, "over"),
    "other rollout": Holder(key_of("r2", "0", "train"), 403),
    "other attempt": Holder(key_of("r1", "1", "train"), 403),
    "other mode": Holder(key_of("r1", "0", "val"), 403),
}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    with FakeModelServer() as model:
        async with running_gateway(tmp_path, config(gateway={"hold_limit_s": 0.2})) as running:
            running.register(model.url)
            for name in ("r1", "r2", "over"):
                await running.add(name)
            await running.add("v1", is_train=False)
            await running.http.post("/api/rollouts/over/attempt/0/seal")
            yield running


@pytest.fixture
async def anyone(gateway: RunningGateway) -> AsyncIterator[httpx.AsyncClient]:
    """Without a key of its own."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
        yield http


async def request(http: httpx.AsyncClient, route: str, holder: Holder, header: str) -> httpx.Response:
    """The answer, of which a stream without end is not read."""
    method, path = route.split(" ")
    names = {"rollout_id": holder.rollout_id, "attempt_id": "0", "mode": holder.mode, "name": "m"}
    value = {"authorization": f"Bearer {holder.key}", "x-api-key": holder.key or ""}[header]
    headers = {header: value} if holder.key else {}
    body = next((body for tail, body in BODIES.items() if path.endswith(tail)), BODY) if method == "POST" else None
    url = path.replace(":path}", "}").format(**names)
    async with http.stream(method, url, json=body, headers=headers) as response:
        if "event-stream" not in response.headers.get("content-type", ""):
            await response.aread()
        return response


def expected(route: str, name: str) -> int | None:
    """The status of the refusal; None where the request must be let in."""
    holder, may = HOLDERS[name], MAY[route]
    if may == ANYONE:
        return None
    if holder.refused == 401 or may == AGENT:
        # An event's path names no mode, so both keys of the attempt may post it.
        return None if name == "other mode" and route.endswith("/events") else holder.refused
    return 403


def test_whoever_adds_a_route_says_who_may_use_it() -> None:
    assert served() == MAY.keys()


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_every_route_with_every_kind_of_key(anyone: httpx.AsyncClient, header: str) -> None:
    for route in MAY:
        for name, holder in HOLDERS.items():
            refusal = expected(route, name)
            response = await request(anyone, route, holder, header)
            where = f"{route} with the key {name}: {response.status_code} {response.text[:200]}"
            if refusal is None:
                # A WebSocket is no question of keys.
                assert response.status_code < 400 or response.status_code == 426, where
                continue
            assert response.status_code == refusal, where
            body = response.json()
            sentence = body["error"]["message"] if route.split()[1].startswith(BASE) else body["detail"]
            assert sentence.endswith("."), where
            assert holder.key is None or holder.key not in response.text, where


async def test_the_admins_key_opens_every_route(anyone: httpx.AsyncClient) -> None:
    admin = Holder(ADMIN_KEY, None)
    for route in sorted(MAY, key=lambda route: route.startswith("DELETE")):
        response = await request(anyone, route, admin, "authorization")
        assert response.status_code not in (401, 403, 404, 500), f"{route}: {response.status_code}"


async def test_after_sealing_an_agents_key_opens_nothing_but_the_admins_does(
    gateway: RunningGateway, anyone: httpx.AsyncClient
) -> None:
    await gateway.http.post("/api/rollouts/r1/attempt/0/seal")
    events = "/api/rollouts/r1/attempt/0/events"
    for route, may in MAY.items():
        if may == AGENT:
            assert (await request(anyone, route, HOLDERS["agent train"], "x-api-key")).status_code == 409, route
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
    for secret in (ADMIN_KEY, HOLDERS["agent train"].key):
        assert not any(secret in text for text in texts if secret)


async def test_what_is_not_served_is_told_in_the_shape_that_the_client_reads(gateway: RunningGateway) -> None:
    base = "/proxy/rollout/r1/attempt/0/mode/train"
    anthropic = await gateway.http.get(f"{base}/anthropic/v1/messages/batches")
    message = "The gateway does not serve GET anthropic/v1/messages/batches."
    assert anthropic.status_code == 404
    assert anthropic.json() == {"type": "error", "error": {"type": "not_found_error", "message": message}}
    openai = await gateway.http.delete(f"{base}/openai/v1/models/x")
    assert (openai.status_code, openai.json()["error"]["type"]) == (404, "not_found_error")
    assert (await gateway.http.put(f"{base}/openai/v1/models")).json()["error"]["code"] is None
    assert (await gateway.http.get("/api/nothing")).json() == {"detail": "Not Found"}


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
