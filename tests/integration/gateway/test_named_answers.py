"""Answers that a harness names instead of repeating them: put in from the record, and known as the parent of a call."""

from __future__ import annotations

import threading
from typing import Any

import anthropic
import openai
import pytest

from agl_runtime.store import codec
from fakes.model_server import Answer, FakeModelServer, tool_call
from fakes.running_gateway import RunningGateway

ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def result(call_id: str) -> Any:
    return {"type": "function_call_output", "call_id": call_id, "output": "2"}


async def parents(gateway: RunningGateway) -> list[int | None]:
    """For each call the place of the call that it continues."""
    calls = [call.info for call in await gateway.calls()]
    places = {call.call_id: place for place, call in enumerate(calls)}
    return [places[call.parent_id] if call.parent_id else None for call in calls]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_conversation_by_previous_response_is_the_one_that_sends_all_of_it(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI, stream: bool, is_restarted: bool
) -> None:
    script = [Answer("so", reasoning="hm", tool_calls=[tool_call("add", {"a": 1}, "c1")]), Answer("two"), Answer("bye")]
    model.script = [*script, *script]

    async def ask(**body: Any) -> Any:
        if is_restarted:
            await gateway.gateway.attempts.close("r1")  # forgets the attempt, as a restart does
        if not stream:
            return await client.responses.create(model="policy", tools=[ADD], **body)
        async with client.responses.stream(model="policy", tools=[ADD], **body) as events:
            return await events.get_final_response()

    first = await ask(input="1+1?")
    second = await ask(input=[result("c1")], previous_response_id=first.id)
    third = await ask(input="thanks", previous_response_id=second.id)
    assert (third.output_text, third.previous_response_id, third.store) == ("bye", second.id, True)

    talk: list[Any] = [{"role": "user", "content": "1+1?"}]
    for more in (result("c1"), {"role": "user", "content": "thanks"}, None):
        answer = await ask(input=talk)
        talk += [*(item.model_dump(exclude_none=True) for item in answer.output), more]
    bodies = [request.body for request in model.requests]
    assert [body["messages"] for body in bodies[:3]] == [body["messages"] for body in bodies[3:]]
    assert await parents(gateway) == [None, 0, 1, None, 3, 4]
    recorded = (await gateway.calls())[2].request
    assert [item.get("type") for item in recorded["input"]][1:4] == ["reasoning", "message", "function_call"]


async def test_items_can_be_named_by_their_ids(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer("", tool_calls=[tool_call("add", {"a": 1}, "c1")]), Answer("two")]
    first = await client.responses.create(model="policy", input="1+1?", tools=[ADD])
    talk: list[Any] = [{"role": "user", "content": "1+1?"}]
    talk += [{"type": "item_reference", "id": first.output[0].id}, result("c1")]
    assert (await client.responses.create(model="policy", input=talk, tools=[ADD])).output_text == "two"
    assert [message["role"] for message in model.requests[1].body["messages"]] == ["user", "assistant", "tool"]
    assert await parents(gateway) == [None, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_this_attempt_did_not_answer_to_be_stored_is_not_found(
    gateway: RunningGateway, client: openai.AsyncOpenAI, stream: bool
) -> None:
    await gateway.add("r2")
    async with openai.AsyncOpenAI(base_url=gateway.base("r2"), api_key=gateway.key("r2"), max_retries=0) as other:
        theirs = await other.responses.create(model="policy", input="hi")
    unstored = await client.responses.create(model="policy", input="hi", store=False)
    assert unstored.store is False
    for name in ("resp_unknown", theirs.id, unstored.id):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="policy", input="go", previous_response_id=name, stream=stream)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    for name in (theirs.output[0].id, unstored.output[0].id, "msg_unknown"):
        item: Any = {"type": "item_reference", "id": name}
        with pytest.raises(openai.NotFoundError, match=r"Item with id 'msg_.*' not found"):
            await client.responses.create(model="policy", input=[item], stream=stream)
    assert len(await gateway.calls()) == 1


async def test_a_sealed_attempt_is_not_gone_on_with(gateway: RunningGateway, client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="policy", input="hi")
    await gateway.http.post("/api/rollouts/r1/attempt/0/seal")
    with pytest.raises(openai.ConflictError):
        await client.responses.create(model="policy", input="go", previous_response_id=first.id)


async def test_a_text_that_a_harness_changed_is_known_by_the_id_of_its_answer(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer("same"), Answer("same"), Answer("end")]
    said = [await client.responses.create(model="policy", input="hi") for _ in range(2)]
    talk: list[Any] = [{"role": "user", "content": "hi"}]
    item = {**said[1].output[0].model_dump(), "content": [{"type": "output_text", "text": "other", "annotations": []}]}
    await client.responses.create(model="policy", input=[*talk, item, *talk])
    assert await parents(gateway) == [None, None, 1]


async def test_thinking_names_the_message_that_it_is_of(gateway: RunningGateway, model: FakeModelServer) -> None:
    model.script = [Answer("same", reasoning="hm"), Answer("same", reasoning="hm"), Answer("end")]
    talk: list[Any] = [{"role": "user", "content": "hi"}]
    asked: Any = {"model": "policy", "max_tokens": 99}
    base = gateway.base(api="anthropic")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=gateway.key(), max_retries=0) as client:
        first = await client.messages.create(messages=talk, **asked)
        await client.messages.create(messages=talk, **asked)
        said = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
        await client.messages.create(messages=[*talk, said, *talk], **asked)
    assert await parents(gateway) == [None, None, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_another_api_is_no_previous_response(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI, stream: bool
) -> None:
    async with anthropic.AsyncAnthropic(api_key=gateway.key(), base_url=gateway.base(api="anthropic")) as other:
        answer = await other.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="m", input="x", previous_response_id=answer.id, stream=stream)
    assert refused.value.code == "previous_response_not_found"
    assert len(model.requests) == 1


async def test_a_conversation_that_is_only_named_is_written_beside_the_event_loop(
    gateway: RunningGateway, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[bool] = []
    encode, here = codec.encode, threading.get_ident()
    monkeypatch.setattr(codec, "encode", lambda *args: writers.append(threading.get_ident() == here) or encode(*args))
    first = await client.responses.create(model="m", input="x")
    await client.responses.create(model="m", input="y", previous_response_id=first.id)
    assert writers == [True, False]
