"""Harnesses that leave, and that send again: what is sampled, what is replayed, what is on record when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import orjson
import pytest

from agl_runtime.errors import StoreError
from agl_runtime.gateway.service import LONG_BYTES
from agl_runtime.store import codec
from agl_runtime.store.base import StoredCall
from fakes.model_server import Answer, FakeModelServer, tool_call
from fakes.running_gateway import RunningGateway

USER: Any = {"role": "user", "content": "x"}
BODY = {"model": "m", "messages": [USER]}
RETRY = {"x-stainless-retry-count": "1"}


def url(gateway: RunningGateway) -> str:
    return f"{gateway.base()}/chat/completions"


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what the gateway does in its own time, such as noticing that a client has gone."""
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


async def full(*_: object) -> None:
    raise StoreError("The disk is full.", "Free some space.")


async def seen(model: FakeModelServer, count: int) -> None:
    await asyncio.to_thread(model.wait_for, lambda server: len(server.requests) == count)


async def settled(gateway: RunningGateway) -> list[StoredCall]:
    async def is_settled() -> bool:
        calls = await gateway.store.calls("r1")
        return bool(calls) and all(call.info.committed for call in calls)

    await until(is_settled)
    return await gateway.store.calls("r1")


async def test_a_harness_that_leaves_a_stream_leaves_what_had_come(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer("some words", gated_end=True)]
    stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text == "some words":
            break
    await stream.close()
    (call,) = await settled(gateway)
    assert call.info.reason == "cut"
    assert call.response is not None
    assert call.response["choices"][0]["message"]["content"] == "some words"


async def test_content_is_passed_on_before_the_answer_ends_and_its_end_only_after_the_commit(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer("some words", gated_end=True)]
    stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text == "some words" and not chunk.choices[0].finish_reason:
            (call,) = await gateway.store.calls("r1")
            assert not call.info.committed
            model.release()
        if chunk.choices[0].finish_reason:
            (call,) = await gateway.store.calls("r1")
            assert call.info.committed


async def test_a_marked_retry_is_answered_from_the_record(gateway: RunningGateway, model: FakeModelServer) -> None:
    model.script = lambda _: Answer(f"answer {len(model.requests)}")
    for stream in (False, True):
        body = {**BODY, "stream": stream}
        first = await gateway.http.post(url(gateway), json=body)
        again = await gateway.http.post(url(gateway), json=body, headers=RETRY)
        number = 2 if stream else 1
        assert f"answer {number}" in again.text
        assert len(model.requests) == number
        if not stream:
            assert again.json() == first.json()


async def test_a_marked_retry_after_the_attempts_end_is_refused(
    gateway: RunningGateway, model: FakeModelServer
) -> None:
    assert (await gateway.http.post(url(gateway), json=BODY)).status_code == 200
    await gateway.store.seal("r1", "0")
    await gateway.gateway.attempts.close("r1")
    again = await gateway.http.post(url(gateway), json=BODY, headers=RETRY)
    assert (again.status_code, len(model.requests)) == (409, 1)


async def test_a_marked_retry_joins_the_call_that_still_runs(gateway: RunningGateway, model: FakeModelServer) -> None:
    model.script = [Answer("once", gated=True)]
    first = asyncio.create_task(gateway.http.post(url(gateway), json=BODY))
    await seen(model, 1)
    second = asyncio.create_task(gateway.http.post(url(gateway), json=BODY, headers=RETRY))
    (running,) = gateway.gateway.attempts.all_running()

    async def both_read() -> bool:
        return running.exchange.readers == 2  # type: ignore[attr-defined]

    await until(both_read)
    first.cancel()
    model.release()
    assert (await second).json()["choices"][0]["message"]["content"] == "once"
    assert (len(model.requests), model.cancelled) == (1, 0)
    (call,) = await gateway.calls()
    assert (call.info.delivered, call.info.trainable) == (True, True)


async def test_a_retry_of_what_failed_or_never_came_is_sampled(gateway: RunningGateway, model: FakeModelServer) -> None:
    model.script = [Answer(status=500), Answer("fine")]
    assert (await gateway.http.post(url(gateway), json=BODY)).status_code == 500
    again = await gateway.http.post(url(gateway), json=BODY, headers=RETRY)
    assert again.json()["choices"][0]["message"]["content"] == "fine"
    other = {**BODY, "seed": 1}
    assert (await gateway.http.post(url(gateway), json=other, headers=RETRY)).status_code == 200
    assert len(model.requests) == 3


async def test_the_clients_own_retry_after_a_time_out_does_not_sample_beside_the_first(
    gateway: RunningGateway, model: FakeModelServer
) -> None:
    model.script = [Answer("late", gated=True), Answer("second")]
    client = openai.AsyncOpenAI(base_url=gateway.base(), api_key=gateway.key(), max_retries=1, timeout=0.5)
    async with client:
        answer = await client.chat.completions.create(model="m", messages=[USER])
    assert answer.choices[0].message.content == "second"
    await asyncio.to_thread(model.wait_for, lambda server: server.cancelled == 1)
    first, second = await gateway.calls()
    assert (first.info.reason, second.info.trainable) == ("cut", True)


async def test_a_call_underway_is_counted_as_running(gateway: RunningGateway, model: FakeModelServer) -> None:
    model.script = [Answer("late", gated=True)]
    asking = asyncio.create_task(gateway.http.post(url(gateway), json=BODY))
    await seen(model, 1)
    counts = (await gateway.http.get("/api/counts")).json()
    assert (counts["calls.running"], counts["calls.incomplete"]) == (1, 0)
    model.release()
    await asking
    assert (await gateway.http.get("/api/counts")).json()["calls.running"] == 0


async def test_sealing_puts_running_calls_on_record_and_refuses_later_ones(
    gateway: RunningGateway, model: FakeModelServer
) -> None:
    model.script = [Answer(gated=True)]
    running = asyncio.create_task(gateway.http.post(url(gateway), json=BODY))
    await seen(model, 1)
    assert (await gateway.http.post("/api/rollouts/r1/attempt/0/seal")).status_code == 204
    assert (await running).status_code == 409
    late = await gateway.http.post(url(gateway), json=BODY)
    assert (late.status_code, late.headers["x-should-retry"]) == (409, "false")
    assert late.json()["error"]["message"] == "Attempt 0 has ended; its late calls are refused."
    _, packed, incomplete = await gateway.store.packed_calls("r1")
    assert [call.info.reason for call in packed] == ["cut"]
    assert incomplete == []
    assert len(model.requests) == 1


async def test_ending_or_deleting_a_rollout_ends_its_calls(gateway: RunningGateway, model: FakeModelServer) -> None:
    model.script = [Answer(gated=True)]
    await gateway.add("r2")
    second = f"{gateway.base('r2')}/chat/completions"
    tasks = [asyncio.create_task(gateway.http.post(target, json=BODY)) for target in (url(gateway), second)]
    await seen(model, 2)
    await gateway.http.patch("/api/rollouts/r1", json={"status": {"state": "failed"}})
    await gateway.http.delete("/api/rollouts/r2")
    assert [(await task).status_code for task in tasks] == [409, 409]
    assert (await gateway.http.post(url(gateway), json=BODY)).status_code == 409
    assert (await gateway.http.post(second, json=BODY)).status_code == 404


async def test_a_stopping_gateway_leaves_a_running_call_visibly_incomplete(
    gateway: RunningGateway, model: FakeModelServer
) -> None:
    model.script = [Answer(gated=True)]
    task = asyncio.create_task(gateway.http.post(url(gateway), json=BODY))
    await seen(model, 1)
    gateway.gateway.stop()
    task.cancel()
    await asyncio.to_thread(model.wait_for, lambda server: server.cancelled == 1)
    _, packed, incomplete = await gateway.store.packed_calls("r1")
    assert (packed, len(incomplete)) == ([], 1)


async def test_parents_are_known_again_after_a_restart(gateway: RunningGateway, model: FakeModelServer) -> None:
    call = tool_call("f", {}, "c1")
    model.script = [Answer("", tool_calls=[call]), Answer("end")]
    await gateway.http.post(url(gateway), json=BODY)
    await gateway.gateway.attempts.close("r1")  # forgets the attempt, as a restart does, without sealing it
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1"}]
    await gateway.http.post(url(gateway), json={**BODY, "messages": messages})
    first, second = await gateway.store.calls("r1")
    assert second.info.parent_id == first.info.call_id


async def test_a_call_that_is_abandoned_before_it_runs_still_gets_its_end(
    gateway: RunningGateway, model: FakeModelServer
) -> None:
    inside = gateway.gateway
    dialect = inside.dialects["openai/v1/chat/completions"]
    await inside.calls.open("r1", "0", "train", dialect, orjson.dumps(BODY), {})
    (call,) = inside.attempts.all_running()
    await inside.attempts.close("r1")

    async def has_ended() -> bool:
        return call.exchange.ended

    await until(has_ended)
    assert call.exchange.status == 409
    assert model.requests == []


async def test_an_answer_that_cannot_be_recorded_is_not_given_out(
    gateway: RunningGateway, model: FakeModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.store, "commit_call", full)
    model.script = [Answer("precious")]
    for stream in (False, True):
        response = await gateway.http.post(url(gateway), json={**BODY, "stream": stream})
        assert "The disk is full. Free some space." in response.text
        assert '"finish_reason":"stop"' not in response.text
        assert response.status_code == (200 if stream else 503)
    _, packed, incomplete = await gateway.store.packed_calls("r1")
    assert (packed, len(incomplete)) == ([], 2)


async def test_a_delivery_that_cannot_be_recorded_leaves_the_connection_to_the_next_call(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(gateway.store, "mark_delivered", full)
        assert (await gateway.http.post(url(gateway), json=BODY)).status_code == 200
    (call,) = await gateway.calls()
    assert (call.info.trainable, call.info.reason) == (False, "undelivered")
    assert [record.exc_info for record in caplog.records] == [None]
    assert "it was delivered cannot be recorded: The disk is full." in caplog.text


async def test_a_retry_that_cannot_be_looked_up_is_refused_with_the_stores_reason(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.store, "find_retry", full)
    response = await gateway.http.post(url(gateway), json=BODY, headers=RETRY)
    assert (response.status_code, response.json()["error"]["message"]) == (503, "The disk is full. Free some space.")


async def test_what_takes_time_to_write_is_written_beside_the_event_loop(
    gateway: RunningGateway, model: FakeModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[bool] = []
    encode, here = codec.encode, threading.get_ident()
    monkeypatch.setattr(codec, "encode", lambda *args: writers.append(threading.get_ident() == here) or encode(*args))
    await gateway.http.post(url(gateway), json=BODY)
    await gateway.http.post(url(gateway), json={**BODY, "unknown": [None] * LONG_BYTES})
    await gateway.gateway.attempts.close("r1")  # forgets the attempt, as a restart does
    await gateway.http.post(url(gateway), json=BODY)
    await gateway.http.post(url(gateway), json=BODY)
    assert writers == [True, False, False, True]


async def test_a_client_that_leaves_before_a_quick_answer_did_not_get_it(
    gateway: RunningGateway, model: FakeModelServer
) -> None:
    body, target = orjson.dumps(BODY), httpx.URL(url(gateway))
    head = f"POST {target.path} HTTP/1.1\r\nHost: x\r\nAuthorization: {gateway.http.headers['Authorization']}\r\n"
    for _ in range(5):
        _, writer = await asyncio.open_connection(target.host, target.port)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        writer.transport.abort()
    calls = await settled(gateway)
    assert [(call.info.delivered, call.info.trainable) for call in calls] == [(False, False)] * len(calls)


async def test_a_client_that_leaves_within_its_request_is_no_fault_of_the_gateway(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    address = httpx.URL(url(gateway))
    _, writer = await asyncio.open_connection(address.host, address.port)
    head = f"POST {address.path} HTTP/1.1\r\nHost: x\r\nx-api-key: {gateway.key()}\r\nContent-Length: 9\r\n\r\n"
    writer.write(head.encode() + b"{")
    await writer.drain()
    writer.close()
    await until(lambda: asyncio.sleep(0, gateway.gateway.metrics.refused[499] == 1))
    assert caplog.records == []


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize(
    ("slow", "method", "path", "body"),
    [
        ("seal", "POST", "/attempt/0/end", {"event_type": "agent_exit", "data": {}}),
        ("patch_rollout", "PATCH", "", {"status": {"state": "failed"}}),
        ("next_attempt", "POST", "/attempt", {"controller_id": "c", "after": "0"}),
    ],
)
async def test_a_call_that_comes_while_its_attempt_is_sealed_is_refused_and_leaves_no_trace(
    gateway: RunningGateway,
    model: FakeModelServer,
    monkeypatch: pytest.MonkeyPatch,
    slow: str,
    method: str,
    path: str,
    body: dict[str, Any],
    *,
    is_known: bool,
) -> None:
    await gateway.store.claim("c", 1, 60.0)
    if is_known:
        await gateway.http.post(url(gateway), json=BODY)
    on_time, at_once, late = len(model.requests), getattr(gateway.store, slow), []

    async def slowly(*args: Any) -> Any:
        late.append(await gateway.http.post(url(gateway), json=BODY))
        return await at_once(*args)

    monkeypatch.setattr(gateway.store, slow, slowly)
    assert (await gateway.http.request(method, f"/api/rollouts/r1{path}", json=body)).is_success
    assert ([response.status_code for response in late], len(model.requests)) == ([409], on_time)
    assert len(await gateway.store.calls("r1", "0")) == on_time
