"""The official Anthropic client through the gateway: what the agent sees, and what is on record of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from agl_runtime.calls import unpack
from fakes.messages import order, read_by_client
from fakes.model_server import Answer, FakeModelServer, encode, render, tool_call
from fakes.running_gateway import RunningGateway, running_gateway

USER: Any = {"role": "user", "content": "what is 1+1?"}
ADD: Any = {"name": "add", "input_schema": {"type": "object"}}
ASK: Any = {"model": "claude-x", "max_tokens": 50, "messages": [USER]}


@pytest.fixture
async def claude(gateway: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """As the agent of r1 has it, without retries."""
    base = gateway.base(api="anthropic")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=gateway.key(), max_retries=0) as made:
        yield made


async def test_a_message_and_its_stream_are_recorded_alike(
    gateway: RunningGateway, model: FakeModelServer, claude: anthropic.AsyncAnthropic
) -> None:
    model.script = [Answer("two", reasoning="easy")]
    whole = await claude.messages.create(**ASK)
    async with claude.messages.stream(**ASK) as stream:
        texts = [text async for text in stream.text_stream]
        streamed = await stream.get_final_message()
    assert "".join(texts) == "two"
    assert [block.type for block in whole.content] == ["thinking", "text"]
    same = {"content": {0: {"signature"}}, "id": True}
    assert streamed.model_dump(mode="json", exclude=same) == whole.model_dump(mode="json", exclude=same)  # type: ignore[arg-type]
    stored = await gateway.calls()
    for call in unpack([call.packed for call in stored if call.packed]):
        assert call.prompt_ids.tolist() == encode(render([USER]))
        assert call.sampled_ids.tolist() == encode("two</>")
        assert (call.info.dialect, call.info.trainable, call.info.delivered) == ("messages", True, True)
    assert [call.response["id"] for call in stored if call.response] == [whole.id, streamed.id]


async def test_a_tool_loop_links_its_calls_and_gives_back_what_was_thought(
    gateway: RunningGateway, model: FakeModelServer, claude: anthropic.AsyncAnthropic
) -> None:
    calls = [tool_call("add", {"a": 1, "carry": False}, "c1"), tool_call("add", {}, "c2")]
    model.script = [Answer("I add", reasoning=" hm\n", tool_calls=calls), Answer("two")]
    messages: list[Any] = [USER]
    for _ in range(2):
        async with claude.messages.stream(model="policy", max_tokens=50, messages=messages, tools=[ADD]) as stream:
            message = await stream.get_final_message()
        messages.append(message.to_param())
        uses = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "2"} for use in uses]
        messages += [{"role": "user", "content": results}] if uses else []
    assert message.stop_reason == "end_turn"
    first, second = await gateway.calls()
    assert second.info.parent_id == first.info.call_id
    assert model.requests[1].body["messages"][1:] == [
        {"role": "assistant", "content": "I add", "reasoning_content": " hm\n", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
    ]


def test_the_synchronous_client_reads_streams(model: FakeModelServer, tmp_path: Path) -> None:
    model.script = [Answer("the sum is two", tool_calls=[tool_call("add", {"a": 1})])]

    def agent(base: str, key: str) -> anthropic.types.Message:
        with (
            anthropic.Anthropic(base_url=base, auth_token=key, api_key=None, max_retries=0) as client,
            client.messages.stream(**ASK, tools=[ADD]) as stream,
        ):
            return stream.get_final_message()

    async def run() -> anthropic.types.Message:
        async with running_gateway(tmp_path) as gateway:
            gateway.register(model.url)
            await gateway.add()
            return await asyncio.to_thread(agent, gateway.base(api="anthropic"), gateway.key())

    message = asyncio.run(run())
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert message.content[1].input == {"a": 1}  # type: ignore[union-attr]


async def test_a_tool_call_is_complete_only_once_it_is_on_record(
    gateway: RunningGateway, model: FakeModelServer
) -> None:
    model.script = [
        Answer("", tool_calls=[tool_call("add", {"a": 1}), tool_call("add", {"a": 2}, "c2")], gated_end=True)
    ]
    body = {**ASK, "tools": [ADD], "stream": True}
    async with gateway.http.stream(
        "POST", f"{gateway.base(api='anthropic')}/v1/messages?beta=true", json=body
    ) as reply:
        parts = reply.aiter_bytes()
        data = b""
        while b"input_json_delta" not in data:
            data += await anext(parts)
        assert not any(call.info.committed for call in await gateway.store.calls("r1"))
        assert b"content_block_stop" not in data
        model.release()
        data += b"".join([part async for part in parts])
    assert order(data)[-5:] == ["1 tool_use", "1 input_json_delta", "1 stop", "delta", "stop"]


async def test_a_marked_retry_gets_the_recorded_message_again(gateway: RunningGateway, model: FakeModelServer) -> None:
    model.script = [Answer("I add", reasoning="hm", tool_calls=[tool_call("add", {"a": 1})])]
    url, marked = f"{gateway.base(api='anthropic')}/v1/messages", {"x-stainless-retry-count": "1"}
    whole = [await gateway.http.post(url, json=ASK, headers=headers) for headers in ({}, marked)]
    assert whole[0].json() == whole[1].json()
    body = {**ASK, "stream": True}
    streamed = [await gateway.http.post(url, json=body, headers=headers) for headers in ({}, marked)]
    assert read_by_client(streamed[0].content) == read_by_client(streamed[1].content)
    assert len(model.requests) == 2


async def test_errors_are_the_clients_own(
    gateway: RunningGateway, model: FakeModelServer, claude: anthropic.AsyncAnthropic
) -> None:
    said = "This model's maximum context length is 64 tokens. However, your request has 90 input tokens."
    model.script = [Answer(status=400, error={"error": {"message": said}}), Answer(status=500), Answer(fault="cut")]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 90 tokens > 64 maximum"):
        await claude.messages.create(**ASK)
    with pytest.raises(anthropic.InternalServerError, match="api_error"):
        await claude.messages.create(**ASK)
    with pytest.raises(anthropic.APIStatusError, match="api_error"):
        async with claude.messages.stream(**ASK) as stream:
            await stream.get_final_message()
    reasons = [call.info.reason for call in await gateway.calls()]
    assert reasons == ["context_overflow", "error", "cut"]
    async with anthropic.AsyncAnthropic(base_url=gateway.base(api="anthropic"), api_key="no", max_retries=0) as other:
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            await other.messages.create(**ASK)


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"{", b"{}"])
@pytest.mark.parametrize("tail", ["v1/messages", "v1/messages/count_tokens"])
async def test_what_is_no_request_is_refused_in_anthropics_shape(
    gateway: RunningGateway, body: bytes, tail: str
) -> None:
    reply = await gateway.http.post(f"{gateway.base(api='anthropic')}/{tail}", content=body)
    assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )


async def test_tokens_are_counted_by_the_server_or_estimated_and_never_recorded(
    gateway: RunningGateway, model: FakeModelServer, claude: anthropic.AsyncAnthropic
) -> None:
    raw = claude.messages.with_raw_response
    counted = await raw.count_tokens(model="m", messages=[USER])
    assert counted.headers["x-agl-token-count"] == "server"
    assert (await counted.parse()).input_tokens == len(encode(render([USER])))
    model.can_tokenize = False
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 4000}
    picture: Any = {"role": "user", "content": [{"type": "image", "source": source}]}
    guessed = await raw.count_tokens(model="m", messages=[USER, picture], tools=[ADD])
    assert guessed.headers["x-agl-token-count"] == "estimate"
    assert 20 < (await guessed.parse()).input_tokens < 120
    gateway.gateway.set_models(None)
    assert (await claude.messages.count_tokens(model="m", messages=[USER])).input_tokens > 5
    assert await gateway.calls() == []
    assert model.requests == []


async def test_models_are_listed_and_any_name_is_known(claude: anthropic.AsyncAnthropic) -> None:
    assert [model.id async for model in claude.models.list()] == ["policy"]
    assert (await claude.models.retrieve("claude-haiku-x")).id == "claude-haiku-x"


@pytest.mark.parametrize("method", ["HEAD", "GET"])
async def test_a_client_that_says_hello_is_answered_without_a_key(gateway: RunningGateway, method: str) -> None:
    async with httpx.AsyncClient() as anyone:
        assert (await anyone.request(method, f"{gateway.base(api='anthropic')}/api/hello")).status_code == 200
        refused = await anyone.get(f"{gateway.base(api='anthropic')}/v1/models")
    assert (refused.status_code, refused.json()["type"]) == (401, "error")


async def test_what_is_not_served_is_told_in_the_vendors_shape(gateway: RunningGateway) -> None:
    reply = await gateway.http.post(f"{gateway.base(api='anthropic')}/v1/messages/batches", json={})
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    reply = await gateway.http.post(f"{gateway.base()}/embeddings", json={})
    assert reply.json()["error"]["param"] is None
