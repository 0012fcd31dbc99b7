"""Model servers that are dead, slow, wrong or talk nonsense: what the agent is told and what stands on record."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agl_runtime.gateway import wire
from fakes.model_server import Answer, FakeModelServer
from fakes.running_gateway import RunningGateway, config, running_gateway

USER: Any = {"role": "user", "content": "x"}
BODY = {"model": "m", "messages": [USER]}
OVERFLOW = {
    "error": {"message": "This model's maximum context length is 8 tokens.", "type": "BadRequestError", "code": 400}
}


async def post(gateway: RunningGateway, **body: Any) -> httpx.Response:
    return await gateway.http.post(f"{gateway.base()}/chat/completions", json={**BODY, **body})


async def reasons(gateway: RunningGateway) -> list[str | None]:
    return [call.info.reason for call in await gateway.calls()]


async def failures(gateway: RunningGateway) -> list[dict[str, Any]]:
    return [event.data for event in await gateway.store.events("r1") if event.event_type == "upstream_failure"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (Answer(fault="drop"), 502),
        (Answer(status=500), 500),
        (Answer(status=503), 503),
        (Answer(status=401), 502),
        (Answer(status=404), 502),
        (Answer(fault="garbage"), 502),
        (Answer(fault="list"), 502),
        (Answer(fault="empty"), 502),
        (Answer("x", finish_reason="abort"), 502),
    ],
)
async def test_a_broken_server_is_told_in_openais_shape_and_recorded(
    gateway: RunningGateway, model: FakeModelServer, answer: Answer, status: int, stream: bool
) -> None:
    model.script = [answer]
    response = await post(gateway, stream=stream)
    if stream and answer.finish_reason == "abort":
        assert response.status_code == 200
        assert response.text.rsplit("data: ", 1)[1].startswith('{"error"')
    else:
        assert response.status_code == status
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == "server_error"
    (call,) = await gateway.calls()
    assert call.info.http_status == status
    assert not call.info.trainable
    assert call.info.reason in ("error", "cut")
    (failure,) = await failures(gateway)
    assert failure == {"call_id": call.info.call_id, "http_status": status, "message": failure["message"]}
    assert failure["message"].startswith("The model server")


HALF_ARGUMENTS = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\ud800"}'}}


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("openai/v1/chat/completions", BODY, Answer("", reasoning="\ud800")),
        ("openai/v1/responses", {"input": "x"}, Answer("", reasoning="\ud800")),
        ("anthropic/v1/messages", BODY, Answer("", tool_calls=[HALF_ARGUMENTS], ids="absent")),
    ],
)
async def test_an_answer_with_half_a_character_is_the_servers_fault_and_on_record_in_every_dialect(
    gateway: RunningGateway, model: FakeModelServer, path: str, body: dict[str, Any], answer: Answer
) -> None:
    model.script = [answer]
    response = await gateway.http.post(f"{gateway.base(api='')}{path}", json=body)
    assert (response.status_code, "cannot be told again" in response.text) == (502, True)
    assert await reasons(gateway) == ["error"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [200, 400])
async def test_an_answer_without_end_is_broken_off_and_recorded(
    gateway: RunningGateway, model: FakeModelServer, monkeypatch: pytest.MonkeyPatch, status: int, stream: bool
) -> None:
    monkeypatch.setattr(wire, "ANSWER_BYTES", 10_000)
    model.script = [Answer("x" * 20_000, status=status, error={"error": "x" * 20_000})]
    response = await post(gateway, stream=stream)
    assert "does not end its answer" in response.text
    assert "[DONE]" not in response.text
    assert not {"trainable", None} & {call.info.reason for call in await gateway.calls()}
    (failure,) = await failures(gateway)
    assert failure["http_status"] == 502


async def test_a_server_that_stays_away_past_the_hold_limit_is_told_and_recorded(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, config(gateway={"hold_limit_s": 0.05})) as gateway:
        await gateway.add()
        gateway.register("http://127.0.0.1:9/v1")
        response = await post(gateway)
        assert (response.status_code, response.headers["retry-after"]) == (429, "5")
        assert response.headers["x-agl-paused"] == "true"
        assert "http://127.0.0.1:9/v1 could not be reached" in response.json()["error"]["message"]
        assert await reasons(gateway) == ["error"]
        assert len(await failures(gateway)) == 1


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_server_that_dies_under_a_call_and_comes_back_costs_the_agent_nothing_but_time(
    tmp_path: Path, elsewhere: bool
) -> None:
    """Its connection breaks before the first byte, and then nothing listens until it serves again."""
    async with running_gateway(tmp_path, config(gateway={"upstream_retries": 1})) as gateway:
        await gateway.add()
        with FakeModelServer([Answer(gated=True)]) as first:
            gateway.register(first.url, version=3, run_epoch=1)
            task = asyncio.create_task(post(gateway))
            await asyncio.to_thread(first.wait_for, lambda server: len(server.requests) == 1)
        async with asyncio.timeout(20):
            while gateway.gateway.hold.state().held == 0:
                await asyncio.sleep(0.01)
        assert gateway.gateway.hold.state().inflight == 0
        with FakeModelServer([Answer("again")], port=0 if elsewhere else first.port) as second:
            if elsewhere:
                gateway.gateway.set_models(None)
                gateway.register(second.url, version=3, run_epoch=2)
            assert (await task).json()["choices"][0]["message"]["content"] == "again"
        (call,) = await gateway.calls()
        assert (call.info.trainable, call.info.reason) == (True, None)
        assert gateway.gateway.hold.held_total_s > 0
        assert await failures(gateway) == []


async def test_a_harness_that_leaves_while_its_server_is_away_leaves_a_cut_call(gateway: RunningGateway) -> None:
    gateway.gateway.set_models(None)
    gateway.register("http://127.0.0.1:9/v1")
    with pytest.raises(httpx.ReadTimeout):
        await gateway.http.post(f"{gateway.base()}/chat/completions", json=BODY, timeout=0.2)
    assert await reasons(gateway) == ["cut"]
    assert (gateway.gateway.hold.state().held, gateway.gateway.hold.state().inflight) == (0, 0)


async def test_a_silent_server_is_told_and_not_asked_again(tmp_path: Path, model: FakeModelServer) -> None:
    model.script = [Answer(gated=True)]
    settings = config(gateway={"upstream_timeout_s": 0.2, "upstream_retries": 3})
    async with running_gateway(tmp_path, settings) as gateway:
        gateway.register(model.url)
        await gateway.add()
        response = await post(gateway)
        assert response.status_code == 504
        assert "fell silent" in response.json()["error"]["message"]
        assert len(model.requests) == 1
        assert await reasons(gateway) == ["error"]


async def test_a_stream_that_is_cut_ends_with_an_error_event_and_keeps_what_came(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer("a long answer", fault="cut")]
    stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
    seen: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="broke off"):
        await read()
    assert "".join(seen) == "a lo"
    (call,) = await gateway.calls()
    assert (call.info.reason, call.info.trainable, call.info.http_status) == ("cut", False, 502)
    assert call.response is not None
    assert call.response["choices"][0]["message"]["content"] == "a lo"
    assert call.response["error"]["type"] == "server_error"
    assert len(await failures(gateway)) == 1


async def test_an_overflow_is_the_agents_limit_and_no_failure(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer(status=400, error=OVERFLOW)]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=[USER])
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 8 tokens" in caught.value.message
    assert await reasons(gateway) == ["context_overflow"]
    assert await failures(gateway) == []


async def test_a_mistake_of_the_agent_is_told_as_the_server_put_it(
    gateway: RunningGateway, model: FakeModelServer
) -> None:
    model.script = [Answer(status=422, error={"detail": "`top_k` must be an integer."})]
    response = await post(gateway, top_k="x")
    assert (response.status_code, response.json()["error"]["message"]) == (422, "`top_k` must be an integer.")
    assert await failures(gateway) == []


@pytest.mark.parametrize("failure", [Answer(fault="drop"), Answer(status=503)])
async def test_a_failure_before_the_first_byte_is_tried_again_on_another_endpoint(
    tmp_path: Path, failure: Answer
) -> None:
    with FakeModelServer([failure]) as bad, FakeModelServer([Answer("ok")]) as good:
        async with running_gateway(tmp_path) as gateway:
            gateway.register(bad.url)
            gateway.register(good.url)
            for number in range(16):
                await gateway.add(f"r{number}")
                url = f"{gateway.base(f'r{number}')}/chat/completions"
                assert (await gateway.http.post(url, json=BODY)).status_code == 200
            # Only the first call that met the failing endpoint had to move; the others went elsewhere at once.
            assert len(bad.requests) == 1
            assert len(good.requests) == 16


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
async def test_a_passing_fault_is_hidden_from_the_agent(tmp_path: Path, model: FakeModelServer, status: int) -> None:
    model.script = [Answer(status=status), Answer("fine")]
    async with running_gateway(tmp_path) as gateway:
        gateway.register(model.url)
        await gateway.add()
        assert (await post(gateway)).json()["choices"][0]["message"]["content"] == "fine"
        (call,) = await gateway.calls()
        assert (call.retry_count, call.info.trainable) == (1, True)
        assert await failures(gateway) == []


async def test_a_mistake_of_the_agent_is_not_tried_again(tmp_path: Path, model: FakeModelServer) -> None:
    model.script = [Answer(status=400)]
    async with running_gateway(tmp_path) as gateway:
        gateway.register(model.url)
        await gateway.add()
        assert (await post(gateway)).status_code == 400
        assert len(model.requests) == 1


async def test_distribution_parameters_are_refused_where_configured(tmp_path: Path, model: FakeModelServer) -> None:
    async with running_gateway(tmp_path, config(gateway={"distribution_params": "refuse"})) as gateway:
        gateway.register(model.url)
        await gateway.add()
        response = await post(gateway, top_p=0.5)
        assert response.status_code == 400
        assert "top_p" in response.json()["error"]["message"]
        assert (await post(gateway, top_p=1.0)).status_code == 200


async def test_an_external_server_gets_its_key_and_nobody_else_does(tmp_path: Path, model: FakeModelServer) -> None:
    settings = config(model={"name": "policy", "endpoint": model.url, "api_key": "sk-external"})
    async with running_gateway(tmp_path, settings) as gateway:
        await gateway.add()
        assert (await post(gateway)).status_code == 200
        assert model.requests[0].headers["Authorization"] == "Bearer sk-external"
        assert "sk-external" not in repr(gateway.gateway)
        with FakeModelServer() as other:
            gateway.gateway.set_models(None)
            gateway.register(other.url)
            assert (await post(gateway)).status_code == 200
            assert "Authorization" not in other.requests[0].headers
