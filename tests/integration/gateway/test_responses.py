"""The official openai package speaks the Responses API with the gateway: what the agent sees, and what is recorded."""

from __future__ import annotations

import asyncio
import base64
import os
from typing import Any

import openai
import orjson
import pytest

from fakes.model_server import Answer, FakeModelServer, tool_call
from fakes.running_gateway import RunningGateway

ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Patches."}
OVERFLOW = {"error": {"message": "This model's maximum context length is 8 tokens.", "code": 400}}


async def test_an_answer(gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI) -> None:
    model.script = [Answer("two", reasoning="easy")]
    response = await client.responses.create(model="m", input="what is 1+1?", instructions="be brief", tools=[ADD])
    assert (response.output_text, response.status, response.output[0].type) == ("two", "completed", "reasoning")
    (call,) = await gateway.calls()
    assert (call.info.dialect, call.info.trainable, call.info.delivered) == ("responses", True, True)
    assert call.response is not None
    assert call.response["id"] == response.id
    assert response.usage is not None
    assert response.usage.output_tokens == len("two</>")


async def test_a_tool_loop_over_streams_is_one_conversation_for_the_model_server(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    calls = [tool_call("add", {"a": 1}, "c1"), tool_call("apply_patch", {"input": "a\n"}, "c2")]
    model.script = [Answer("so", reasoning="hm", tool_calls=calls), Answer("done")]
    talk: list[Any] = [{"role": "user", "content": "go"}]
    async with client.responses.stream(model="policy", input=talk, tools=[ADD, PATCH], store=False) as stream:
        seen = [event async for event in stream]
        first = await stream.get_final_response()
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "so"
    talk += [item.model_dump(exclude_none=True) for item in first.output]
    talk.append({"type": "function_call_output", "call_id": "c1", "output": "1"})
    talk.append({"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"})
    second = await client.responses.create(model="policy", input=talk, tools=[ADD, PATCH], store=False)
    assert second.output_text == "done"
    said = model.requests[1].body["messages"][1]
    assert (said["content"], said["reasoning_content"]) == ("so", "hm")
    assert [call["id"] for call in said["tool_calls"]] == ["c1", "c2"]
    one, two = await gateway.calls()
    assert two.info.parent_id == one.info.call_id


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_without_an_id_that_comes_back_in_other_words_goes_on_as_it_was_sampled(
    gateway: RunningGateway, model: FakeModelServer, stream: bool
) -> None:
    sampled = tool_call("apply_patch", {}, "")
    sampled["function"]["arguments"] = '{"input":  "\\u00e9\\/"}'
    model.script = [Answer("", tool_calls=[sampled]), Answer("done")]
    url, talk = f"{gateway.base()}/responses", [{"role": "user", "content": "go"}]
    body = {"model": "policy", "tools": [PATCH], "stream": stream}
    answer = (await gateway.http.post(url, json={**body, "input": talk})).text
    response = orjson.loads(answer.strip().rsplit("data: ", 1)[1])["response"] if stream else orjson.loads(answer)
    (item,) = response["output"]
    assert (item["input"], item["call_id"].startswith("call_")) == ("é/", True)
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    await gateway.http.post(url, json={**body, "input": [*talk, item, result]})
    (call,) = model.requests[1].body["messages"][1]["tool_calls"]
    assert call["function"] == sampled["function"]
    first, second = await gateway.calls()
    assert second.info.parent_id == first.info.call_id


async def test_the_synchronous_client_reads_a_stream(gateway: RunningGateway, model: FakeModelServer) -> None:
    def read() -> Any:
        with openai.OpenAI(base_url=gateway.base(), api_key=gateway.key(), max_retries=0) as client:
            return list(client.responses.create(model="m", input="hi", stream=True))[-1]

    last = await asyncio.to_thread(read)
    assert (last.type, last.response.output_text) == ("response.completed", "ok")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_context_overflow_has_the_code_that_harnesses_look_for(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI, stream: bool
) -> None:
    model.script = [Answer(status=400, error=OVERFLOW)]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="m", input="hi", stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert [call.info.reason for call in await gateway.calls()] == ["context_overflow"]


async def test_a_stream_that_is_cut_fails_as_the_response_that_it_began(
    gateway: RunningGateway, model: FakeModelServer, client: openai.AsyncOpenAI
) -> None:
    model.script = [Answer("the sum is two", fault="cut")]
    async with client.responses.stream(model="m", input="hi") as stream:
        last: Any = [event async for event in stream][-1]
    assert (last.type, last.response.error.code) == ("response.failed", "server_error")
    (call,) = await gateway.calls()
    assert call.info.reason == "cut"


async def test_a_marked_retry_gets_the_recorded_answer_as_a_stream(
    gateway: RunningGateway, model: FakeModelServer
) -> None:
    url, body = f"{gateway.base()}/responses", {"model": "m", "input": "hi", "stream": True}
    first = await gateway.http.post(url, json=body)
    again = await gateway.http.post(url, json=body, headers={"x-stainless-retry-count": "1"})
    assert len(model.requests) == 1
    ends = [response.text.strip().rsplit("data: ", 1)[1] for response in (first, again)]
    assert orjson.loads(ends[0])["response"] == orjson.loads(ends[1])["response"]


async def test_a_websocket_is_answered_426_and_the_connection_goes_on(gateway: RunningGateway) -> None:
    headers = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": base64.b64encode(os.urandom(16)).decode(),
    }
    refused = await gateway.http.get(f"{gateway.base()}/responses", headers=headers)
    assert (refused.status_code, refused.headers["upgrade"]) == (426, "HTTP/1.1")
    assert "POST the request" in refused.json()["error"]["message"]
    answer = await gateway.http.post(f"{gateway.base()}/responses", json={"model": "m", "input": "hi"})
    assert answer.status_code == 200
