"""What happens around calls at real vLLM: clients that leave, pauses, and weights that change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from agl_runtime.calls import Call, VersionSpan
from agl_runtime.schemas import PolicyVersion
from fakes.running_gateway import RunningGateway
from fakes.speakers import SPEAKERS, Talk
from fakes.vllm import OPEN, PLAIN, QUESTION, TOLERANCE, VllmServer, check, teacher_forced, user

LONGEST = 8000  # tokens of an answer that nobody waits for


@pytest.fixture
def first_again(vllm: VllmServer) -> Iterator[None]:
    yield
    vllm.post("/resume")
    vllm.load_weights(vllm.folders[0])
    vllm.post("/reset_prefix_cache")


def spans(call: Call, version: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(0, call.sampled_ids.size, PolicyVersion(1, version)),)


class Streaming:
    """A call that is under way: a long stream of which the first text has been read."""

    def __init__(self, gateway: RunningGateway, max_tokens: int = LONGEST) -> None:
        self._asked = {"messages": [user(QUESTION)], "stream": True, "max_tokens": max_tokens, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {gateway.key()}"}
        self._agent = httpx.AsyncClient(base_url=gateway.base(), headers=headers, timeout=60)

    async def __aenter__(self) -> Streaming:
        request = self._agent.build_request("POST", "chat/completions", json=self._asked)
        self._response = await self._agent.send(request, stream=True)
        self._lines = self._response.aiter_lines()
        for _ in range(3):  # the event of the role, and after a blank line one of text
            await anext(self._lines)
        return self

    async def rest(self) -> list[Any]:
        """The data of the other events."""
        lines = [line.removeprefix("data: ") async for line in self._lines if line]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    async def __aexit__(self, *_: object) -> None:
        await self._response.aclose()
        await self._agent.aclose()


async def reached(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.02)


async def test_a_client_that_leaves_ends_the_generation(gateway: RunningGateway, vllm: VllmServer) -> None:
    async with Streaming(gateway):
        pass
    (call,) = (await gateway.recorded()).calls
    assert (call.info.trainable, call.info.reason) == (False, "cut")
    assert 0 < call.sampled_ids.size < LONGEST
    await reached(lambda: vllm.underway() == 0)
    generated = vllm.generated()
    vllm.post("/v1/completions", {"model": "policy", "prompt": OPEN, "max_tokens": 32, "ignore_eos": True})
    # What had gone on would have got a token in every step of that; the last steps may not be counted yet.
    assert vllm.generated() < generated + 32 + 16


async def test_calls_made_while_the_weights_change_are_served_afterwards(
    gateway: RunningGateway, vllm: VllmServer
) -> None:
    await gateway.http.post("/proxy/pause", json={})
    vllm.post("/pause", mode="wait")
    talks = [
        asyncio.create_task(speak(gateway, Talk(OPEN, max_tokens=8), streamed=streamed))
        for speak in SPEAKERS.values()
        for streamed in (False, True)
    ]
    await reached(lambda: gateway.gateway.hold.state().held == len(talks))
    vllm.post("/resume")
    await gateway.http.post("/proxy/resume")
    assert all(len(said) == 1 for said in await asyncio.gather(*talks))
    calls = (await gateway.recorded()).calls
    assert len(calls) == len(talks)
    for call in calls:
        check(call, vllm.folders[0])


async def test_a_call_that_the_engine_froze_goes_on_after_the_pause(gateway: RunningGateway, vllm: VllmServer) -> None:
    async with Streaming(gateway, max_tokens=300) as stream:
        await asyncio.to_thread(vllm.post, "/pause", mode="keep")
        await asyncio.to_thread(vllm.post, "/resume")
        events = await stream.rest()
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    (call,) = (await gateway.recorded()).calls
    assert call.sampled_ids.size == 300
    check(call, vllm.folders[0])


async def test_a_call_that_the_engine_aborted_is_no_answer(gateway: RunningGateway, vllm: VllmServer) -> None:
    async with Streaming(gateway) as stream:
        await asyncio.to_thread(vllm.post, "/pause", mode="abort")
        await asyncio.to_thread(vllm.post, "/resume")
        events = await stream.rest()
    assert "without finishing it" in events[-1]["error"]["message"]
    (call,) = (await gateway.recorded()).calls
    assert (call.info.trainable, call.info.reason) == (False, "cut")


@pytest.mark.usefixtures("first_again")
async def test_weights_that_change_between_two_calls_of_a_rollout_leave_no_trace_of_the_old_ones(
    gateway: RunningGateway, vllm: VllmServer
) -> None:
    talk = Talk(OPEN * 4, system="be brief " * 8, max_tokens=24)
    await SPEAKERS["chat"](gateway, talk, streamed=True)
    prompt = (await gateway.recorded()).calls[0].prompt_ids.tolist()
    unsalted = {"model": "policy", "prompt": prompt, "max_tokens": 1, "temperature": 0.7, "logprobs": 1}
    unsalted |= {"return_token_ids": True, **PLAIN}
    vllm.post("/v1/completions", unsalted)

    await gateway.http.post("/proxy/pause", json={})
    vllm.load_weights(vllm.folders[1])
    gateway.register(vllm.url, version=2, run_epoch=1)
    await gateway.http.post("/proxy/resume")
    await SPEAKERS["messages"](gateway, talk, streamed=False)

    first, second = (await gateway.recorded()).calls
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
    assert (first.spans, second.spans) == (spans(first, 1), spans(second, 2))
    check(first, vllm.folders[0])
    check(second, vllm.folders[1])
    # The engine itself would have gone on with what the old weights had made of this prompt.
    stale = vllm.post("/v1/completions", unsalted)["choices"][0]
    expected = teacher_forced(vllm.folders[1], prompt, stale["token_ids"], 0.7)
    assert abs(stale["logprobs"]["token_logprobs"][0] - expected[0]) > 100 * TOLERANCE


@pytest.mark.usefixtures("first_again")
async def test_weights_that_change_under_a_call_are_named(gateway: RunningGateway, vllm: VllmServer) -> None:
    vllm.post("/pause", mode="keep")
    talking = asyncio.create_task(SPEAKERS["responses"](gateway, Talk(OPEN, max_tokens=8), streamed=True))
    await reached(lambda: vllm.underway() == 1)
    vllm.load_weights(vllm.folders[1])
    gateway.register(vllm.url, version=2, run_epoch=1)
    vllm.post("/resume")
    assert len(await talking) == 1
    (call,) = (await gateway.recorded()).calls
    assert (call.info.trainable, call.info.reason) == (False, "mixed_versions")
