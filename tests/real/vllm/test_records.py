"""Real vLLM behind a real gateway: of every dialect is recorded what the engine sampled and what its weights say of it.

The log-probabilities are compared with a teacher-forced pass of transformers over the recorded ids, both in float32.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from agl_runtime.samples.build import build_samples
from agl_runtime.samples.types import Limits
from fakes.running_gateway import RunningGateway
from fakes.speakers import SPEAKERS, Talk
from fakes.tiny_model import CALCULATOR
from fakes.vllm import (
    ANSWER,
    ARGUMENTS,
    CONTEXT,
    OPEN,
    PLAIN,
    QUESTION,
    TALKED_OVER,
    THOUGHT,
    TWICE,
    VllmServer,
    calling,
    check,
    user,
)

LIMITS = Limits(max_prompt_tokens=CONTEXT, max_response_tokens=CONTEXT)
EITHER = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
DIALECT = pytest.mark.parametrize("dialect", SPEAKERS)


def tokenizer(vllm: VllmServer) -> Tokenizer:
    return Tokenizer.from_file(str(vllm.folders[0] / "tokenizer.json"))


def post(gateway: RunningGateway, operation: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {gateway.key()}"}
    return httpx.post(f"{gateway.base()}/{operation}", json=body, headers=headers, timeout=60)


@EITHER
@pytest.mark.parametrize("operation", ["chat/completions", "completions"])
async def test_what_is_recorded_is_what_the_engine_says_itself(
    gateway: RunningGateway, vllm: VllmServer, operation: str, streamed: bool, temperature: float
) -> None:
    prompt: dict[str, Any] = {"messages": [user(OPEN)]} if operation == "chat/completions" else {"prompt": OPEN}
    asked = {**prompt, "model": "policy", "seed": 7, "max_tokens": 40}
    told = await asyncio.to_thread(post, gateway, operation, {**asked, "stream": streamed})
    assert told.status_code == 200, told.text
    extras = {"temperature": temperature, "return_token_ids": True, "logprobs": 1}
    itself = vllm.post(f"/v1/{operation}", {**asked, **PLAIN, **extras})
    choice = itself["choices"][0]
    said = choice["logprobs"].get("token_logprobs") or [item["logprob"] for item in choice["logprobs"]["content"]]
    (call,) = (await gateway.recorded()).calls
    assert call.prompt_ids.tolist() == (itself.get("prompt_token_ids") or choice["prompt_token_ids"])
    assert call.sampled_ids.tolist() == choice["token_ids"]
    np.testing.assert_allclose(call.logprobs, said, atol=1e-5, rtol=0)
    check(call, vllm.folders[0])


@EITHER
@DIALECT
async def test_an_answer_is_recorded_as_it_was_sampled_in_every_dialect(
    gateway: RunningGateway, vllm: VllmServer, dialect: str, streamed: bool
) -> None:
    await SPEAKERS[dialect](gateway, Talk(OPEN, system="be brief", max_tokens=40), streamed=streamed)
    (call,) = (await gateway.recorded()).calls
    conversation = [{"role": "system", "content": "be brief"}, user(OPEN)]
    asked = {"model": "policy", "messages": conversation}
    assert call.prompt_ids.tolist() == vllm.post("/tokenize", asked)["tokens"]
    check(call, vllm.folders[0])


@pytest.mark.parametrize("temperature", [0.01])
@EITHER
@DIALECT
@pytest.mark.parametrize("question", [QUESTION, TWICE], ids=["one", "two"])
async def test_tool_calls_are_parsed_and_their_results_continue_the_record(
    gateway: RunningGateway, vllm: VllmServer, question: str, dialect: str, streamed: bool, temperature: float
) -> None:
    talk = Talk(question, tool=CALCULATOR["function"], result="19", max_tokens=150)
    first_said, last_said = await SPEAKERS[dialect](gateway, talk, streamed=streamed)
    assert first_said.calls == tuple(("calculator", json.loads(text)) for text in ARGUMENTS[question])
    assert last_said.text.strip() == ANSWER
    assert first_said.thought == last_said.thought == THOUGHT
    rollout = await gateway.recorded()
    first, second = rollout.calls
    asked = {"model": "policy", "messages": [user(question)], "tools": [CALCULATOR]}
    assert first.prompt_ids.tolist() == vllm.post("/tokenize", asked)["tokens"]
    sampled = tokenizer(vllm).decode(first.sampled_ids.tolist(), skip_special_tokens=False)
    assert sampled == f"{calling(question)}<|im_end|>"
    whole = [*first.prompt_ids.tolist(), *first.sampled_ids.tolist()]
    assert second.prompt_ids[: len(whole)].tolist() == whole
    assert second.info.parent_id == first.info.call_id
    for call in rollout.calls:
        check(call, vllm.folders[0], temperature)
    samples = build_samples(rollout, LIMITS)
    assert len(samples.samples) == 1
    assert samples.report.trained_tokens == first.sampled_ids.size + second.sampled_ids.size


@pytest.mark.parametrize("temperature", [0.01])
async def test_a_record_that_does_not_continue_says_why(gateway: RunningGateway, vllm: VllmServer) -> None:
    """Parser and template both have a line break between a text and the call after it, here as with Qwen's models."""
    talk = Talk(TALKED_OVER, tool=CALCULATOR["function"], result="19")
    said = await SPEAKERS["chat"](gateway, talk, streamed=False)
    assert [answer.text.strip() for answer in said] == ["Let me see.", ANSWER]
    decode = tokenizer(vllm).decode
    samples = build_samples(await gateway.recorded(), LIMITS, lambda ids: decode(list(ids), skip_special_tokens=False))
    assert samples.report.splits == {"trimmed": 1}
    assert len(samples.samples) == 2


@EITHER
async def test_a_call_that_the_harness_forced_is_told_and_not_trained_on(
    gateway: RunningGateway, vllm: VllmServer, streamed: bool
) -> None:
    function = CALCULATOR["function"]
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    asked: Any = {"model": "policy", "messages": [user(QUESTION)], "tools": [tool], "max_tokens": 200}
    asked["tool_choice"] = {"type": "tool", "name": function["name"]}
    base = gateway.base(api="anthropic")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=gateway.key(), max_retries=0) as client:
        if streamed:
            async with client.messages.stream(**asked) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await client.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    assert message.content[-1].type == "tool_use"
    (call,) = (await gateway.recorded()).calls
    assert (call.info.trainable, call.info.reason) == (False, "distribution_changed")
    assert call.logprobs.size == call.sampled_ids.size > 0


@EITHER
@pytest.mark.parametrize("dialect", [*SPEAKERS, "completions"])
async def test_what_does_not_fit_is_told_as_each_dialect_tells_it(
    gateway: RunningGateway, dialect: str, streamed: bool
) -> None:
    long = "What is 12+7? " * CONTEXT
    if dialect == "completions":
        told = await asyncio.to_thread(post, gateway, "completions", {"prompt": long, "stream": streamed})
        assert (told.status_code, told.json()["error"]["code"]) == (400, "context_length_exceeded")
    else:
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            await SPEAKERS[dialect](gateway, Talk(long), streamed=streamed)
        if isinstance(caught.value, openai.BadRequestError):
            assert caught.value.code == "context_length_exceeded"
        else:
            assert "prompt is too long" in caught.value.message
    (call,) = await gateway.calls()
    assert (call.info.trainable, call.info.reason) == (False, "context_overflow")


async def test_tokens_are_counted_by_the_engine(gateway: RunningGateway, vllm: VllmServer) -> None:
    base = gateway.base(api="anthropic")
    tool: Any = {"name": "calculator", "input_schema": {"type": "object"}}
    said: Any = [user(OPEN)]
    async with anthropic.AsyncAnthropic(base_url=base, api_key=gateway.key(), max_retries=0) as client:
        counted = await client.messages.count_tokens(model="policy", messages=said, tools=[tool])
        message = await client.messages.create(model="policy", messages=said, tools=[tool], max_tokens=4)
    assert counted.input_tokens == message.usage.input_tokens
    (call,) = (await gateway.recorded()).calls
    assert counted.input_tokens == call.prompt_ids.size
