"""Agent Lightning v1.0's HTTP API as its own clients use it: routes, shapes and status codes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.model_server import Answer, FakeModelServer
from fakes.running_gateway import RunningGateway, running_gateway

ROLLOUT_KEYS = {"rollout_id", "input", "is_train", "config", "metadata", "status"}
STATUS_KEYS = {"state", "k8s_job_name", "last_attempt_id", "error_message", "version", "created_at", "updated_at"}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tmp_path) as running:
        yield running


@pytest.fixture
def http(gateway: RunningGateway) -> httpx.AsyncClient:
    return gateway.http


async def create(http: httpx.AsyncClient, *rollout_ids: str, **fields: Any) -> list[dict[str, Any]]:
    body = [{"input": {"data_id": f"d-{name}"}, "rollout_id": name, **fields} for name in rollout_ids]
    response = await http.post("/api/rollouts", json=body)
    assert response.status_code == 201
    created: list[dict[str, Any]] = response.json()
    return created


async def patch(http: httpx.AsyncClient, rollout_id: str, **status: Any) -> httpx.Response:
    return await http.patch(f"/api/rollouts/{rollout_id}", json={"status": status})


async def test_health_needs_no_key(gateway: RunningGateway) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as anyone:
        response = await anyone.get("/healthz")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
        assert (await anyone.get("/api/rollouts", params={"state_in": "queuing"})).status_code == 401


async def test_a_created_rollout_has_v1s_shape(http: httpx.AsyncClient) -> None:
    response = await http.post("/api/rollouts", json=[{"input": "task", "metadata": {"batch_idx": 3, "own": "x"}}])
    (rollout,) = response.json()
    assert rollout.keys() == ROLLOUT_KEYS
    assert rollout["status"].keys() == STATUS_KEYS
    assert rollout["config"] == {"timeout_seconds": 3600, "local": None, "k8s": None}
    assert rollout["metadata"] == {"batch_idx": 3, "sample_idx_in_batch": None, "own": "x"}
    assert (rollout["input"], rollout["is_train"], rollout["status"]["state"]) == ("task", True, "queuing")
    assert rollout["rollout_id"]


async def test_a_known_id_returns_the_stored_rollout_unchanged(http: httpx.AsyncClient) -> None:
    (first,) = await create(http, "r1")
    (again,) = await create(http, "r1", is_train=False)
    assert again == first


async def test_an_input_of_any_kind_comes_back_equal(http: httpx.AsyncClient) -> None:
    for value in (None, 1, "text", [1, {"a": None}], {"nested": {"é": [True]}}):
        response = await http.post("/api/rollouts", json=[{"input": value}])
        assert response.json()[0]["input"] == value


async def test_rollouts_are_listed_by_state(http: httpx.AsyncClient) -> None:
    await create(http, "r1", "r2", "r3")
    await patch(http, "r2", state="running")
    params = httpx.QueryParams([("state_in", "queuing"), ("state_in", "running"), ("limit", "2")])
    assert [r["rollout_id"] for r in (await http.get("/api/rollouts", params=params)).json()] == ["r1", "r2"]
    running = await http.get("/api/rollouts", params={"state_in": "running"})
    assert [r["rollout_id"] for r in running.json()] == ["r2"]
    assert (await http.get("/api/rollouts", params={"state_in": "odd"})).status_code == 422


async def test_one_rollout_comes_with_its_attempts(http: httpx.AsyncClient) -> None:
    (rollout,) = await create(http, "r1")
    assert (await http.get("/api/rollouts/r1")).json() == {"rollout": rollout, "attempts": []}
    await http.post("/api/rollouts/r1/attempt/0/events", json={"event_type": "note"})
    assert (await http.get("/api/rollouts/r1")).json()["attempts"] == ["0"]
    missing = await http.get("/api/rollouts/none")
    assert missing.status_code == 404
    assert "none" in missing.json()["detail"]


@pytest.mark.parametrize(
    ("path", "target", "status"),
    [
        ((), "running", 200),
        ((), "failed", 200),
        ((), "succeeded", 409),
        ((), "queuing", 409),
        (("running",), "succeeded", 200),
        (("running",), "failed", 200),
        (("running",), "queuing", 409),
        (("running",), "running", 409),
        (("running", "succeeded"), "failed", 409),
        (("running", "failed"), "running", 409),
    ],
)
async def test_transitions(http: httpx.AsyncClient, path: tuple[str, ...], target: str, status: int) -> None:
    await create(http, "r1")
    for state in path:
        assert (await patch(http, "r1", state=state)).status_code == 200
    response = await patch(http, "r1", state=target)
    assert response.status_code == status
    if status == 200:
        assert response.json()["status"]["state"] == target
    else:
        assert "detail" in response.json()


async def test_a_patch_sets_the_other_fields_and_counts_the_version(http: httpx.AsyncClient) -> None:
    await create(http, "r1")
    response = await patch(http, "r1", state="running", k8s_job_name="job", last_attempt_id="0", error_message="e")
    status = response.json()["status"]
    assert (status["k8s_job_name"], status["last_attempt_id"], status["error_message"]) == ("job", "0", "e")
    assert status["version"] == 2
    assert (await http.patch("/api/rollouts/r1", json={})).json()["status"]["version"] == 2


async def test_unknown_keys_of_a_patch_are_refused(http: httpx.AsyncClient) -> None:
    await create(http, "r1")
    assert (await patch(http, "r1", phase="running")).status_code == 422
    assert (await http.patch("/api/rollouts/r1", json={"input": 1})).status_code == 422
    assert (await patch(http, "none", state="running")).status_code == 404


async def test_deleting_twice_is_no_error(http: httpx.AsyncClient) -> None:
    await create(http, "r1")
    for _ in range(2):
        response = await http.delete("/api/rollouts/r1")
        assert (response.status_code, response.content) == (204, b"")
    assert (await http.get("/api/rollouts/r1")).status_code == 404


async def test_terminal_rollouts_are_paged_in_order_of_completion(http: httpx.AsyncClient) -> None:
    await create(http, "r1", "r2", "r3", is_train=False)
    for name, end in (("r3", "failed"), ("r1", "succeeded")):
        await patch(http, name, state="running")
        await patch(http, name, state=end)
    page = (await http.get("/api/rollouts/terminal", params={"limit": 1})).json()
    item = {"rollout_id": "r3", "state": "failed", "data_id": "d-r3", "is_train": False}
    assert (page["items"], page["total_terminal"]) == ([item], 2)
    rest = (await http.get("/api/rollouts/terminal", params={"after": page["next_after"]})).json()
    assert [entry["rollout_id"] for entry in rest["items"]] == ["r1"]
    end = (await http.get("/api/rollouts/terminal", params={"after": rest["next_after"]})).json()
    assert (end["items"], end["next_after"]) == ([], rest["next_after"])
    assert (await http.get("/api/rollouts/terminal", params={"after": -5, "limit": 0})).status_code == 200


async def test_events_are_posted_and_read_back(http: httpx.AsyncClient) -> None:
    await create(http, "r1")
    posted = await http.post("/api/rollouts/r1/attempt/0/events", json={"event_type": "reward", "data": {"value": 1.0}})
    assert posted.status_code == 200
    event = posted.json()
    assert event.keys() == {"event_type", "rollout_id", "attempt_id", "timestamp", "data"}
    assert (event["rollout_id"], event["attempt_id"], event["data"]) == ("r1", "0", {"value": 1.0})
    assert (await http.get("/api/rollouts/r1/events")).json() == [event]
    assert (await http.get("/api/rollouts/r1/events", params={"event_type": "note"})).json() == []


async def test_events_of_an_unknown_rollout_are_404(http: httpx.AsyncClient) -> None:
    assert (await http.get("/api/rollouts/none/events")).status_code == 404
    response = await http.post("/api/rollouts/none/attempt/0/events", json={"event_type": "x"})
    assert response.status_code == 404


async def test_events_are_those_of_the_last_attempt(http: httpx.AsyncClient) -> None:
    await create(http, "r1")
    for attempt in ("0", "1"):
        await http.post(f"/api/rollouts/r1/attempt/{attempt}/events", json={"event_type": f"of-{attempt}"})
    await patch(http, "r1", state="running", last_attempt_id="1")
    assert [e["event_type"] for e in (await http.get("/api/rollouts/r1/events")).json()] == ["of-1"]


async def test_models_are_registered_and_cleared(http: httpx.AsyncClient) -> None:
    body = [{"model": "policy", "endpoint": "http://m/v1"}]
    response = await http.post("/api/models", json=body)
    assert response.status_code == 201
    assert response.json() == [{"model": "policy", "endpoint": "http://m/v1", "version": 0, "run_epoch": 0}]
    cleared = await http.delete("/api/models")
    assert (cleared.status_code, cleared.json()) == (200, {"status": "ok"})


async def test_the_proxy_is_paused_and_resumed(http: httpx.AsyncClient) -> None:
    idle = {"paused": False, "retry_after_seconds": 5, "reason": None, "inflight": 0, "held": 0}
    assert (await http.get("/proxy/state")).json() == idle
    paused = await http.post("/proxy/pause", json={"retry_after_seconds": 7, "reason": "update"})
    assert paused.json() == {**idle, "paused": True, "retry_after_seconds": 7, "reason": "update"}
    assert (await http.post("/proxy/pause", json={})).json()["retry_after_seconds"] == 5
    resumed = await http.post("/proxy/resume")
    assert (resumed.status_code, resumed.json()) == (200, idle)


async def test_a_model_call_becomes_a_model_request_event_and_a_triplet(gateway: RunningGateway) -> None:
    with FakeModelServer([Answer("four")]) as server:
        gateway.register(server.url, version=7)
        await gateway.add()
        call = {"model": "any", "messages": [{"role": "user", "content": "2+2"}], "temperature": 0.1}
        answer = await gateway.http.post(f"{gateway.base()}/chat/completions", json=call)
        assert answer.json()["choices"][0]["message"]["content"] == "four"
        assert server.requests[0].body["temperature"] == 1.0
    (event,) = (await gateway.http.get("/api/rollouts/r1/events")).json()
    data = event["data"]
    assert event["event_type"] == "model_request"
    assert (data["model"], data["model_version"], data["request"]) == ("policy", 7, call)
    assert data["server"] == {"model": "policy", "endpoint": server.url, "version": 7}
    assert (data["http_status"], data["status"], data["retry_count"], data["finish_reason"]) == (200, "ok", 0, "stop")
    assert data["usage"] == answer.json()["usage"]
    assert data["latency_ms"] > 0
    sampled = data["response"]["choices"][0]["token_ids"]
    assert bytes(sampled) == b"four</>"
    (triplet,) = (await gateway.http.get("/api/rollouts/r1/events", params={"format": "triplet"})).json()
    assert triplet["data"] == {
        "prompt_token_ids": data["response"]["prompt_token_ids"],
        "response_token_ids": sampled,
        "response_log_probs": pytest.approx([-(1 + i) / 8 for i in range(7)]),
        "server": {"model": "policy", "version": 7},
        "http_status": 200,
        "status": "ok",
    }


async def test_calls_that_v1_refuses_are_refused_with_its_status(gateway: RunningGateway) -> None:
    await gateway.add()
    body = {"messages": [{"role": "user", "content": "x"}]}
    http, chat = gateway.http, "chat/completions"
    assert (await http.post(f"{gateway.base('none')}/{chat}", json=body)).status_code == 404
    assert (await http.post(f"{gateway.base(mode='test')}/{chat}", json=body)).status_code == 404
    assert (await http.post(f"{gateway.base()}/embeddings", json=body)).status_code == 404
    assert (await http.post(f"{gateway.base()}/{chat}", content=b"{not json")).status_code == 400
    assert (await http.post(f"{gateway.base()}/{chat}", json=[1])).status_code == 400
