"""Calls that must wait, through the official clients of every dialect: what they notice of it, and what they are told
when the wait is too long or when there are too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from agl_runtime.gateway import hold as hold_module
from fakes.dialects import TALK
from fakes.model_server import Answer, FakeModelServer
from fakes.running_gateway import RunningGateway

Ask = Callable[[RunningGateway, int, bool], Awaitable[str]]
ERRORS = (openai.APIError, anthropic.APIError)
REFUSALS = (openai.RateLimitError, anthropic.RateLimitError)


@asynccontextmanager
async def gpt(gateway: RunningGateway, retries: int) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway.base(), api_key=gateway.key(), max_retries=retries) as client:
        yield client


async def chat(gateway: RunningGateway, retries: int, stream: bool) -> str:
    asked: Any = {"model": "policy", "messages": TALK}
    async with gpt(gateway, retries) as client:
        if stream:
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return (await client.chat.completions.create(**asked)).choices[0].message.content or ""


async def completions(gateway: RunningGateway, retries: int, stream: bool) -> str:
    async with gpt(gateway, retries) as client:
        if stream:
            chunks = [chunk async for chunk in await client.completions.create(model="m", prompt="x", stream=True)]
            return "".join(chunk.choices[0].text for chunk in chunks)
        return (await client.completions.create(model="m", prompt="x")).choices[0].text


async def responses(gateway: RunningGateway, retries: int, stream: bool) -> str:
    async with gpt(gateway, retries) as client:
        if stream:
            events = [event async for event in await client.responses.create(model="m", input="x", stream=True)]
            last: Any = events[-1]
            if last.type == "response.failed":  # what the client leaves to its user
                raise openai.APIError(last.response.error.message, request=None, body=None)  # type: ignore[arg-type]
            return str(last.response.output_text)
        return (await client.responses.create(model="m", input="x")).output_text


async def messages(gateway: RunningGateway, retries: int, stream: bool) -> str:
    asked: Any = {"model": "m", "max_tokens": 9, "messages": TALK}
    base, key = gateway.base(api="anthropic"), gateway.key()
    async with anthropic.AsyncAnthropic(base_url=base, api_key=key, max_retries=retries) as client:
        if stream:
            async with client.messages.stream(**asked) as stream_of:
                return await stream_of.get_final_text()
        block: Any = (await client.messages.create(**asked)).content[0]
        return str(block.text)


ASK = [chat, completions, responses, messages]
every_client = pytest.mark.parametrize("ask", ASK, ids=lambda ask: ask.__name__)
whole_or_streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def kept_alive(gateway: RunningGateway) -> bool:
    (call,) = gateway.gateway.attempts.all_running()
    return len(call.exchange.parts) >= 3


@every_client
@whole_or_streamed
async def test_a_client_without_retries_notices_nothing_of_a_pause(
    gateway: RunningGateway, ask: Ask, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold_module, "KEEP_ALIVE_S", 0.01)
    await gateway.http.post("/proxy/pause", json={})
    asking = asyncio.create_task(ask(gateway, 0, stream))
    await until(lambda: gateway.gateway.hold.state().held == 1)
    await until(lambda: not stream or kept_alive(gateway))
    await gateway.http.post("/proxy/resume")
    assert await asking == "ok"
    assert [call.info.trainable for call in await gateway.calls()] == [True]


@every_client
@whole_or_streamed
async def test_past_the_limit_a_client_gets_429_and_comes_back_by_itself(
    gateway: RunningGateway, ask: Ask, stream: bool
) -> None:
    gateway.gateway.hold.limit_s = 0.05
    await gateway.http.post("/proxy/pause", json={"retry_after_seconds": 7})
    with pytest.raises(REFUSALS, match=r"held for as long as gateway\.hold_limit_s allows") as caught:
        await ask(gateway, 0, stream)
    assert caught.value.response.headers["retry-after"] == "7"  # type: ignore[union-attr]
    await gateway.http.post("/proxy/pause", json={"retry_after_seconds": 0})
    asking = asyncio.create_task(ask(gateway, 9, stream))
    await until(lambda: gateway.gateway.metrics.refused[429] > 1)
    await gateway.http.post("/proxy/resume")
    assert await asking == "ok"


@every_client
async def test_past_the_limit_a_stream_that_was_kept_alive_ends_with_the_error(
    gateway: RunningGateway, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hold_module, "KEEP_ALIVE_S", 0.01)
    gateway.gateway.hold.limit_s = 0.1
    await gateway.http.post("/proxy/pause", json={})
    with pytest.raises(ERRORS, match=r"held for as long as gateway\.hold_limit_s allows"):
        await ask(gateway, 0, True)
    assert [event.event_type for event in await gateway.store.events("r1")] == ["upstream_failure"]


@every_client
@whole_or_streamed
async def test_a_call_beyond_what_may_be_on_its_way_is_shed_and_told_when_to_come_back(
    gateway: RunningGateway, model: FakeModelServer, ask: Ask, stream: bool
) -> None:
    model.script = [Answer(gated=True)]
    metrics = gateway.gateway.metrics
    metrics.pending_bytes = 64 * 2**20 - 100_000  # room for one
    first = asyncio.create_task(ask(gateway, 0, stream))
    await asyncio.to_thread(model.wait_for, lambda server: len(server.requests) == 1)
    with pytest.raises(REFUSALS, match=r"as many as gateway\.max_pending_mb allows") as caught:
        await ask(gateway, 0, stream)
    assert caught.value.response.headers["retry-after"] == "5"  # type: ignore[union-attr]
    assert "agl_shed_total 1\n" in (await gateway.http.get("/metrics")).text
    assert [event.event_type for event in await gateway.store.events("r1")] == ["upstream_failure"]
    model.release()
    assert await first == await ask(gateway, 0, stream) == "ok"
    assert len(model.requests) == 2
    await until(lambda: metrics.pending_bytes == 64 * 2**20 - 100_000)
