"""The official client through the gateway: what the agent sees, and what is on record of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai

from agl_runtime.calls import VersionSpan
from agl_runtime.schemas import PolicyVersion
from fakes.model_server import Answer, FakeModelServer, encode, render, tool_call
from fakes.running_gateway import RunningGateway

USER = {"role": "user", "content": "what is 1+1?"}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def test_a_chat_answer(gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI) -> None:
    model.script = [Answer("two")]
    answer = await client.chat.completions.create(model="gpt-4o", messages=[USER])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "two"
    assert answer.choices[0].logprobs is None
    assert "token_ids" not in answer.model_dump_json()
    (call,) = (await gateway.recorded()).calls
    assert call.prompt_ids.tolist() == encode(render([USER]))
    assert call.sampled_ids.tolist() == encode("two</>")
    assert call.logprobs.dtype == np.float32
    assert call.logprobs.size == call.sampled_ids.size
    assert call.spans == (VersionSpan(0, 6, PolicyVersion(1, 3)),)
    assert (call.info.trainable, call.info.reason, call.info.delivered) == (True, None, True)
    assert (call.info.model, call.info.finish_reason, call.info.http_status) == ("gpt-4o", "stop", 200)


async def test_a_streamed_chat_answer_is_recorded_like_a_whole_one(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer("the sum is two", reasoning="easy")]
    await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)  # type: ignore[list-item]
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "the sum is two"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks)
    whole, streamed = (await gateway.recorded()).calls
    assert np.array_equal(whole.prompt_ids, streamed.prompt_ids)
    assert np.array_equal(whole.sampled_ids, streamed.sampled_ids)
    assert np.array_equal(whole.logprobs, streamed.logprobs)
    assert whole.spans == streamed.spans
    assert streamed.info.trainable
    stored = await gateway.calls()
    first, second = (call.response["choices"][0]["message"] for call in stored if call.response)
    assert first == second


async def test_a_stream_with_usage_ends_with_it(model: FakeModelServer, client: openai.AsyncOpenAI) -> None:
    model.script = [Answer("two")]
    stream = await client.chat.completions.create(
        model="m",
        messages=[USER],  # type: ignore[list-item]
        stream=True,
        stream_options={"include_usage": True},
    )
    last = [chunk async for chunk in stream][-1]
    assert last.usage is not None
    assert last.usage.completion_tokens == 6


async def test_a_tool_loop_links_each_call_to_the_one_it_continues(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer("", tool_calls=[tool_call("add", {"a": 1}, "c1")]), Answer("two")]
    messages: list[Any] = [USER]
    for _ in range(2):
        async with client.chat.completions.stream(model="policy", messages=messages, tools=[ADD]) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            assert call.function.arguments == '{"a": 1}'
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
    assert messages[-1]["content"] == "two"
    first, second = (await gateway.recorded()).calls
    assert second.info.parent_id == first.info.call_id
    end = first.prompt_ids.size + first.sampled_ids.size
    assert second.prompt_ids[:end].tolist() == [*first.prompt_ids.tolist(), *first.sampled_ids.tolist()]


async def test_plain_completions_streamed_and_not(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer("continued")]
    answer = await client.completions.create(model="m", prompt="once")
    stream = await client.completions.create(model="m", prompt="once", stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert answer.choices[0].text == text == "continued"
    calls = (await gateway.recorded()).calls
    assert [call.info.dialect for call in calls] == ["completions", "completions"]
    assert all(call.info.trainable and call.prompt_ids.tolist() == encode("once") for call in calls)


async def test_extras_that_the_agent_asked_for_reach_it(model: FakeModelServer, client: openai.AsyncOpenAI) -> None:
    model.script = [Answer("two", versions=[{"version": "1.3", "start": 0, "end": 6}])]
    answer = await client.chat.completions.create(
        model="m",
        messages=[USER],  # type: ignore[list-item]
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    choice = answer.model_dump()["choices"][0]
    assert choice["token_ids"] == encode("two</>")
    assert len(choice["logprobs"]["content"]) == 6
    assert choice["weight_versions"] == [{"version": "1.3", "start": 0, "end": 6}]


async def test_the_servers_version_spans_are_recorded(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    spans = [{"version": "1.3", "start": 0, "end": 2}, {"version": "1.4", "start": 2, "end": 6}]
    model.script = [Answer("two", versions=spans)]
    await (await client.chat.completions.create(model="m", messages=[USER], stream=True)).close()  # type: ignore[list-item]
    await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    last = (await gateway.recorded()).calls[-1]
    assert last.spans == (VersionSpan(0, 2, PolicyVersion(1, 3)), VersionSpan(2, 6, PolicyVersion(1, 4)))


async def test_validation_calls_are_recorded_and_not_trained(gateway: RunningGateway, model: FakeModelServer) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.base(mode="val"), api_key=gateway.key(mode="val")) as client:
        await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
    (call,) = (await gateway.recorded()).calls
    assert (call.info.trainable, call.info.reason) == (False, "validation")
    assert call.sampled_ids.tolist() == encode("ok</>")
    assert "logprobs" not in model.requests[0].body


async def test_a_foreign_model_beside_the_policy_is_answered_and_set_apart(
    gateway: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    for name in ("policy", "small", "policy"):
        await client.chat.completions.create(model=name, messages=[USER])  # type: ignore[list-item]
    kinds = [(call.info.kind, call.info.reason) for call in (await gateway.recorded()).calls]
    assert kinds == [("main", None), ("auxiliary", "auxiliary"), ("main", None)]


async def test_several_choices_reach_the_agent_and_are_not_trained(
    gateway: RunningGateway, client: openai.AsyncOpenAI
) -> None:
    answer = await client.chat.completions.create(model="m", messages=[USER], n=3)  # type: ignore[list-item]
    assert len(answer.choices) == 3
    (call,) = (await gateway.recorded()).calls
    assert call.info.reason == "multiple_choices"


async def test_the_models_of_a_rollout_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["policy"]


async def test_many_agents_at_once_each_get_their_own_answer(gateway: RunningGateway, model: FakeModelServer) -> None:
    import asyncio

    model.script = lambda body: Answer(f"for {body['messages'][0]['content']}")

    async def one(number: int) -> str | None:
        name = f"many-{number}"
        await gateway.add(name)
        async with openai.AsyncOpenAI(base_url=gateway.base(name), api_key=gateway.key(name)) as client:
            message: Any = {"role": "user", "content": name}
            answer = await client.chat.completions.create(model="m", messages=[message])
            return answer.choices[0].message.content

    answers = await asyncio.gather(*(one(number) for number in range(12)))
    assert answers == [f"for many-{number}" for number in range(12)]
