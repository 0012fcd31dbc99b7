"""Experts of a Mixture-of-Experts on their way through the gateway, which has them of whole answers alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agl_runtime.gateway import service
from fakes.model_server import Answer, FakeModelServer, encode, render, routing, tool_call
from fakes.running_gateway import RunningGateway, config, running_gateway

USER: Any = {"role": "user", "content": "what is 1+1?"}


@pytest.fixture
async def gateway(tmp_path: Path, model: FakeModelServer) -> AsyncIterator[RunningGateway]:
    settings = config(train={"backend": "verl", "routing_replay": True}, gateway={"upstream_retries": 0})
    async with running_gateway(tmp_path, settings) as running:
        running.register(model.url, version=3, run_epoch=1)
        await running.add()
        yield running


async def test_the_experts_of_a_conversation_are_recorded_and_not_told(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer("two", routes=True), Answer("three", routes=True)]
    extra = {"return_token_ids": True}
    said = await client.chat.completions.create(model="m", messages=[USER], top_p=0.5, extra_body=extra)
    assert "routed_experts" not in said.model_dump_json()
    more: Any = [USER, {"role": "assistant", "content": "two"}, {"role": "user", "content": "and one more?"}]
    await client.chat.completions.create(model="m", messages=more)
    first, second = (await gateway.recorded()).calls
    assert (first.info.reason, second.info.trainable) == ("distribution_changed", True)
    for call, trace in ((first, render([USER]) + "two</>"), (second, render(more) + "three</>")):
        assert call.routing is not None
        assert call.routing.whole().tolist() == routing(encode(trace)).tolist()
    assert second.routing is not None
    assert second.routing.start == first.prompt_ids.size + first.sampled_ids.size - 1
    assert "routed_experts" not in str([call.response for call in await gateway.calls()])


async def test_a_harness_that_streams_gets_a_stream_of_an_answer_that_was_asked_for_whole(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer("two", tool_calls=[tool_call("add", {"a": 1})], routes=True)]
    stream = await client.chat.completions.create(
        model="m", messages=[USER], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.content == "two"
    assert [call.function.name for call in chunks[0].choices[0].delta.tool_calls or [] if call.function] == ["add"]
    assert chunks[-1].usage is not None
    assert not {"stream", "stream_options"} & model.requests[0].body.keys()
    (call,) = (await gateway.recorded()).calls
    assert call.info.trainable
    assert call.info.delivered
    assert call.routing is not None


async def test_a_server_that_tells_no_experts_is_recorded_without(
    gateway: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    await client.chat.completions.create(model="m", messages=[USER])
    (call,) = (await gateway.recorded()).calls
    assert (call.info.trainable, call.routing) == (True, None)


async def test_a_refusal_reaches_a_harness_that_streams_as_a_response(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer(status=400)]
    with pytest.raises(openai.BadRequestError, match="scripted failure"):
        await client.chat.completions.create(model="m", messages=[USER], stream=True)


WAYS = {
    "openai/v1/chat/completions": ({"messages": [USER]}, ": keep-alive"),
    "openai/v1/responses": ({"input": "what is 1+1?"}, ": keep-alive"),
    "anthropic/v1/messages": ({"messages": [USER], "max_tokens": 9}, "event: ping"),
}


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize("status", [200, 400])
async def test_a_harness_that_streams_hears_that_its_call_goes_on_and_then_how_it_ended(
    gateway: RunningGateway, model: FakeModelServer, monkeypatch: pytest.MonkeyPatch, path: str, status: int
) -> None:
    monkeypatch.setattr(service, "KEEP_ALIVE_S", 0.01)
    model.script = [Answer("two", routes=True, gated=True, status=status)]
    api, _, operation = path.rpartition("v1/")
    body, quiet = WAYS[path]
    url = f"{gateway.base(api=api.rstrip('/'))}/v1/{operation}"
    async with gateway.http.stream("POST", url, json={"model": "policy", "stream": True, **body}) as stream:
        lines = stream.aiter_lines()
        assert await anext(lines) == quiet
        model.release()
        said = "\n".join([line async for line in lines])
    assert ("two" in said, "scripted failure" in said) == (status == 200, status == 400)
    (call,) = (await gateway.recorded()).calls
    assert (call.routing is not None, call.info.http_status, call.info.delivered) == (status == 200, status, True)


async def test_a_harness_that_leaves_while_it_waits_ends_the_call_at_the_model_server(
    gateway: RunningGateway, model: FakeModelServer
) -> None:
    model.script = [Answer("two", routes=True, gated=True)]
    with pytest.raises(httpx.ReadTimeout):
        await gateway.http.post(
            f"{gateway.base()}/chat/completions", json={"messages": [USER], "stream": True}, timeout=0.2
        )
    await asyncio.to_thread(model.wait_for, lambda server: server.cancelled == 1)
    (call,) = await gateway.calls()
    assert (call.info.reason, call.info.http_status) == ("cut", 499)
