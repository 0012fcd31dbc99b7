"""What controller, trainer and command line do, through agl's own client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import SecretStr

from agl_runtime.client import GatewayClient
from agl_runtime.errors import ConflictError, NotFoundError
from agl_runtime.schemas import (
    Change,
    CheckpointRecord,
    ClaimRequest,
    LeaseRenewal,
    Model,
    NextAttempt,
    PartStatus,
    RolloutCreate,
    RolloutState,
)
from fakes.model_server import Answer, FakeModelServer, tool_call
from fakes.running_gateway import ADMIN_KEY, RunningGateway

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
async def control(gateway: RunningGateway) -> AsyncIterator[GatewayClient]:
    async with GatewayClient(gateway.url, ADMIN_KEY, patience_s=5) as client:
        yield client


def claim(**fields: Any) -> ClaimRequest:
    return ClaimRequest(controller_id="c1", **fields)


async def call(gateway: RunningGateway, attempt_id: str = "0", key: str | None = None) -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = f"{gateway.base(attempt_id=attempt_id)}/chat/completions"
    return (await gateway.http.post(url, json=BODY, headers=headers)).status_code


async def test_a_claim_grants_rollouts_with_a_key_that_works(gateway: RunningGateway, control: GatewayClient) -> None:
    (grant,) = await control.claim(claim(limit=5))
    assert (grant.rollout.rollout_id, grant.attempt_id) == ("r1", "0")
    assert grant.rollout.status.state is RolloutState.RUNNING
    assert grant.agent_key not in repr(grant)
    assert await call(gateway, key=grant.agent_key) == 200
    assert await control.claim(claim(limit=5, held=["r1"])) == []


async def test_no_request_takes_a_way_through_a_thread(gateway: RunningGateway, control: GatewayClient) -> None:
    """But for the store's own two."""
    await control.claim(claim())
    await control.add_event("r1", "0", "reward", {"value": 1.0})
    assert await control.events("r1")
    await control.finish("r1", RolloutState.SUCCEEDED)
    assert [thread.name for thread in threading.enumerate() if "AnyIO" in thread.name] == []


async def test_a_waiting_claim_is_woken_by_a_new_rollout(control: GatewayClient) -> None:
    await control.claim(claim())
    waiting = asyncio.create_task(control.claim(claim(held=["r1"], wait=20)))
    await control.add_rollouts([RolloutCreate(input={}, rollout_id="r2")])
    assert [grant.rollout.rollout_id for grant in await waiting] == ["r2"]


async def test_an_expired_lease_is_granted_anew_and_the_old_attempts_calls_are_refused(
    gateway: RunningGateway, control: GatewayClient
) -> None:
    (first,) = await control.claim(claim(lease_s=0.05))
    other = ClaimRequest(controller_id="c2", wait=20)
    (second,) = await control.claim(other)
    assert (second.rollout.rollout_id, second.attempt_id) == ("r1", "1")
    assert await call(gateway, "0", first.agent_key) == 409
    assert await call(gateway, "1", second.agent_key) == 200
    assert (await control.renew(LeaseRenewal(controller_id="c1", rollout_ids=["r1"]))).lost == ["r1"]


async def test_the_next_attempt_closes_the_one_before_it(gateway: RunningGateway, control: GatewayClient) -> None:
    (first,) = await control.claim(claim())
    request = NextAttempt(controller_id="c1", after="0")
    second = await control.next_attempt("r1", request)
    again = await control.next_attempt("r1", request)
    assert (second.attempt_id, again.attempt_id, again.agent_key) == ("1", "1", second.agent_key)
    assert await call(gateway, "0", first.agent_key) == 409
    assert await call(gateway, "1", second.agent_key) == 200
    with pytest.raises(ConflictError, match="does not hold rollout r1"):
        await control.next_attempt("r1", NextAttempt(controller_id="c2", after="1"))


async def test_a_waiting_terminal_page_is_woken_by_an_end(control: GatewayClient) -> None:
    await control.claim(claim())
    waiting = asyncio.create_task(control.terminal(0, wait_s=20))
    await control.finish("r1", RolloutState.SUCCEEDED)
    page = await waiting
    assert [item.rollout_id for item in page.items] == ["r1"]
    assert (await control.terminal(page.next_after, wait_s=0)).items == []
    await control.finish("r1", RolloutState.SUCCEEDED)
    with pytest.raises(ConflictError):
        await control.finish("r1", RolloutState.FAILED)


async def test_an_event_that_is_sent_again_is_kept_once(gateway: RunningGateway) -> None:
    body = {"event_type": "note", "data": {"n": 1}, "event_id": "e1"}
    for _ in range(2):
        await gateway.http.post("/api/rollouts/r1/attempt/0/events", json=body)
    assert len(await gateway.store.events("r1")) == 1


@pytest.mark.parametrize(
    ("values", "reward"),
    [([], None), ([0.25], 0.25), ([0, 1], 1.0), ([0.5, "text"], None), ([True], 1.0), ([None], None)],
)
async def test_the_calls_of_a_rollout_come_with_its_last_reward(
    gateway: RunningGateway, control: GatewayClient, values: list[Any], reward: float | None
) -> None:
    await call(gateway)
    for value in values:
        await control.add_event("r1", "0", "reward", {"value": value})
    read = await control.calls("r1")
    assert (read.rollout_id, read.attempt_id, read.reward, read.incomplete) == ("r1", "0", reward, ())
    assert len(read.calls) == 1


async def test_only_the_last_attempts_calls_and_reward_count(gateway: RunningGateway, control: GatewayClient) -> None:
    await control.claim(claim())
    await call(gateway, "0")
    await control.add_event("r1", "0", "reward", {"value": 1.0})
    await control.next_attempt("r1", NextAttempt(controller_id="c1", after="0"))
    read = await control.calls("r1")
    assert (read.attempt_id, read.calls, read.reward) == ("1", (), None)


async def test_an_attempts_end_is_one_request(
    gateway: RunningGateway, control: GatewayClient, model: FakeModelServer
) -> None:
    await control.claim(claim())
    model.script = [Answer(fault="drop")]
    await call(gateway)
    failures = await control.end_attempt("r1", "0", {"exit_code": 0})
    assert [event.event_type for event in failures] == ["upstream_failure"]
    assert [event.data for event in await control.events("r1", event_type="agent_exit")] == [{"exit_code": 0}]
    assert await call(gateway) == 409


async def test_calls_as_json_are_there_to_be_read(gateway: RunningGateway, model: FakeModelServer) -> None:
    model.script = [Answer("", tool_calls=[tool_call("f", {"a": "é"})])]
    await call(gateway)
    await gateway.calls()
    (shown,) = (await gateway.http.get("/api/rollouts/r1/calls", params={"format": "json"})).json()
    assert shown["request"] == BODY
    assert shown["response"]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert (shown["info"]["trainable"], shown["info"]["http_status"]) == (True, 200)
    assert shown["versions"] == [{"start": 0, "end": shown["sampled_tokens"], "version": "1.3"}]


async def test_an_unknown_rollout_is_not_found_everywhere(gateway: RunningGateway, control: GatewayClient) -> None:
    for read in (control.rollout, control.calls, control.events):
        with pytest.raises(NotFoundError, match=r"^There is no rollout none\. Look at `agl rollouts ls`\.$"):
            await read("none")
    assert (await gateway.http.post("/api/rollouts/none/attempt/0/seal")).status_code == 404
    assert (await gateway.http.get("/api/rollouts/none/calls?format=json")).status_code == 404


async def test_parts_report_and_the_gateway_reports_itself(control: GatewayClient) -> None:
    await control.report(PartStatus(part="trainer", pid=7, state="running", waiting_for="2 of 8 groups"))
    await control.report(PartStatus(part="trainer", pid=7, state="saving", detail={"step": 3}))
    own, trainer = await control.parts()
    assert (own.part, own.state, own.waiting_for) == ("gateway", "running", None)
    assert (trainer.state, trainer.detail) == ("saving", {"step": 3})
    assert trainer.updated_at > 0
    await control.clear_models()
    assert (await control.parts())[0].waiting_for == "a model server"


async def test_checkpoints_are_recorded_and_listed(control: GatewayClient) -> None:
    record = CheckpointRecord(run_id="run", version="1.2", step=2, path="/x", rollout_ids=["r1"])
    await control.record_checkpoint(record)
    assert await control.checkpoints() == [record]


async def test_counts_name_rollouts_by_state_and_calls_by_reason(
    gateway: RunningGateway, control: GatewayClient, model: FakeModelServer
) -> None:
    model.script = [Answer(logprobs="nan")]
    await call(gateway)
    counts = await control.counts()
    assert (counts["rollouts.queuing"], counts["calls.logprobs_not_finite"]) == (1, 1)


async def test_registered_models_are_listed(gateway: RunningGateway, model: FakeModelServer) -> None:
    (shown,) = (await gateway.http.get("/api/models")).json()
    assert shown == {"model": "policy", "endpoint": model.url, "version": 3, "run_epoch": 1}


async def test_the_change_stream_tells_what_moved(gateway: RunningGateway, control: GatewayClient) -> None:
    changes: list[Change] = []

    async def listen() -> None:
        async for change in control.changes(after=1):
            changes.append(change)
            if change.kind == "checkpoint":
                return

    listening = asyncio.create_task(listen())
    await control.add_rollouts([RolloutCreate(input={"secret": "task"}, rollout_id="r2")])
    await control.pause("update")
    await control.resume()
    await control.register_model(Model(model="policy", endpoint="http://m/v1", version=9))
    await control.report(PartStatus(part="controller", pid=1, state="running"))
    await control.finish("r2", RolloutState.FAILED, "why")
    await control.record_checkpoint(CheckpointRecord(run_id="r", version="1.1", step=1, path="p", rollout_ids=[]))
    await listening
    assert [change.kind for change in changes] == [
        "rollout", "proxy", "proxy", "models", "part", "rollout", "checkpoint",
    ]  # fmt: skip
    assert changes[1].data["paused"]
    assert changes[5].data["status"]["error_message"] == "why"
    assert "input" not in changes[5].data


async def test_the_change_stream_ends_when_the_gateway_stops(gateway: RunningGateway, control: GatewayClient) -> None:
    async def listen() -> int:
        return len([change async for change in control.changes()])

    listening = asyncio.create_task(listen())
    terminal = asyncio.create_task(control.terminal(0, wait_s=60))
    await control.counts()
    gateway.gateway.stop()
    assert await listening >= 1
    assert (await terminal).items == []


async def test_metrics_are_prometheus_text(gateway: RunningGateway) -> None:
    await call(gateway)
    response = await gateway.http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "agl_call_seconds_count 1" in response.text.splitlines()
    assert 'agl_rollouts{state="queuing"} 1' in response.text.splitlines()


async def test_a_model_servers_key_is_sent_to_it_and_shown_to_nobody(
    gateway: RunningGateway, control: GatewayClient, model: FakeModelServer
) -> None:
    await control.register_model(Model(model="policy", endpoint=model.url, api_key=SecretStr("hidden-key")))
    path = f"{gateway.base()}/chat/completions"
    answer = await gateway.http.post(path, json={"messages": [{"role": "user", "content": "x"}]})
    assert model.requests[-1].headers["Authorization"] == "Bearer hidden-key"
    listed = await gateway.http.get("/api/models")
    assert [set(row) for row in listed.json()] == [{"model", "endpoint", "version", "run_epoch"}]
    again = await gateway.http.post("/api/models", json=[{**listed.json()[0], "api_key": "hidden-key"}])
    told = [answer.text, listed.text, again.text, (await gateway.http.get("/api/rollouts/r1/events")).text]
    told += [change.model_dump_json() for change in gateway.gateway.changes.since(0)]
    told += [repr(gateway.gateway.registry.models()), repr(await gateway.calls())]
    assert not [text for text in told if "hidden-key" in text]


@pytest.mark.parametrize(
    ("endpoint", "what"),
    [
        ("nonsense", "begins with http:// or https:// and a host"),
        ("http://host:99999/v1", "Port out of range"),
        ("http:///v1", "begins with http:// or https:// and a host"),
        ("http://me:secret@host/v1", "holds no user, query or fragment; its key is api_key"),
        ("http://host/v1?key=secret", "holds no user, query or fragment; its key is api_key"),
    ],
)
async def test_an_address_that_no_call_could_use_is_not_registered(
    gateway: RunningGateway, endpoint: str, what: str
) -> None:
    before = (await gateway.http.get("/api/models")).json()
    refused = await gateway.http.post("/api/models", json=[{"model": "m", "endpoint": endpoint}])
    assert refused.status_code == 422
    assert what in refused.text
    assert (await gateway.http.get("/api/models")).json() == before
