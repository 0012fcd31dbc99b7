"""One conversation (an image, reasoning, a tool, two turns) through every dialect is one record.

Each dialect's official client holds it in its own words, streamed and not. What the model server is sent and which
tokens are recorded are the same for all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from agl_runtime.calls import Call
from agl_runtime.client import GatewayClient
from fakes.model_server import Answer, FakeModelServer, Raw, tool_call
from fakes.running_gateway import ADMIN_KEY, RunningGateway, config, running_gateway

SYSTEM, QUESTION, RESULT = "be brief", "what is on it?", "2"
IMAGE = "data:image/png;base64,iVBORw0KGgo="
PARAMETERS: Raw = {"type": "object", "properties": {"a": {"type": "integer"}}}
ABOUT = "Counts."
UNLIKE = ("stream", "stream_options", "max_tokens")  # the last one is not optional for Anthropic's client
SCRIPT = [Answer("Counting. ", reasoning="hm\n two?", tool_calls=[tool_call("count", {"a": 1}, "c1")]), Answer("two")]


async def chat(gateway: RunningGateway, *, streamed: bool) -> str:
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {
            "role": "user",
            "content": [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": IMAGE}}],
        },
    ]
    function = {"name": "count", "description": ABOUT, "parameters": PARAMETERS}
    asked: Any = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": function}]}
    said: Any = None
    async with openai.AsyncOpenAI(base_url=gateway.base(), api_key=gateway.key(), max_retries=0) as client:
        for _ in SCRIPT:
            if streamed:
                async with client.chat.completions.stream(**asked) as stream:
                    said = (await stream.get_final_completion()).choices[0].message
            else:
                said = (await client.chat.completions.create(**asked)).choices[0].message
            dumped = said.model_dump(include={"role", "content", "reasoning_content", "tool_calls"}, exclude_none=True)
            for call in dumped.get("tool_calls", []):
                call.pop("index", None)
                call["function"].pop("parsed_arguments", None)
                messages += [dumped, {"role": "tool", "tool_call_id": call["id"], "content": RESULT}]
    return str(said.content)


async def responses(gateway: RunningGateway, *, streamed: bool) -> str:
    content = [{"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": IMAGE, "detail": "auto"}]
    items: list[Any] = [{"role": "user", "content": content}]
    tool = {"type": "function", "name": "count", "description": ABOUT, "parameters": PARAMETERS, "strict": None}
    asked: Any = {"model": "policy", "instructions": SYSTEM, "input": items, "tools": [tool], "store": False}
    said: Any = None
    async with openai.AsyncOpenAI(base_url=gateway.base(), api_key=gateway.key(), max_retries=0) as client:
        for _ in SCRIPT:
            if streamed:
                async with client.responses.stream(**asked) as stream:
                    said = await stream.get_final_response()
            else:
                said = await client.responses.create(**asked)
            items += [item.model_dump(exclude_none=True) for item in said.output]
            called = [item for item in said.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": c.call_id, "output": RESULT} for c in called]
    return str(said.output_text)


async def messages(gateway: RunningGateway, *, streamed: bool) -> str:
    source = {"type": "base64", "media_type": "image/png", "data": IMAGE.partition(",")[2]}
    said: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": QUESTION}, {"type": "image", "source": source}]}
    ]
    cached = {"cache_control": {"type": "ephemeral"}}
    asked: Any = {"model": "policy", "max_tokens": 64, "system": [{"type": "text", "text": SYSTEM, **cached}]}
    asked |= {"messages": said, "tools": [{"name": "count", "description": ABOUT, "input_schema": PARAMETERS}]}
    message: Any = None
    base = gateway.base(api="anthropic")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=gateway.key(), max_retries=0) as client:
        for _ in SCRIPT:
            if streamed:
                async with client.messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**asked)
            said.append(message.to_param())
            called = [block for block in message.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": RESULT, **cached} for c in called]
            said += [{"role": "user", "content": results}] if results else []
    return str(message.content[-1].text)


Speaker = Callable[..., Awaitable[str]]
SPEAKERS: dict[str, Speaker] = {"chat": chat, "responses": responses, "messages": messages}


async def held(folder: Path, speak: Speaker, *, streamed: bool) -> tuple[str, list[Raw], list[Call]]:
    """The last answer, what the model server was sent, and what is on record."""
    folder.mkdir()
    with FakeModelServer(SCRIPT) as model:
        async with running_gateway(folder, config()) as gateway:
            gateway.register(model.url, version=3, run_epoch=1)
            await gateway.add()
            answer = await speak(gateway, streamed=streamed)
            await gateway.calls()
            async with GatewayClient(gateway.url, ADMIN_KEY) as reader:
                calls = (await reader.calls("r1")).calls
    sent = [{k: v for k, v in asked.body.items() if k not in UNLIKE} for asked in model.requests]
    return answer, sent, list(calls)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", SPEAKERS)
async def test_a_conversation_is_the_same_in_every_dialect(tmp_path: Path, dialect: str, streamed: bool) -> None:
    answer, sent, calls = await held(tmp_path / "this", SPEAKERS[dialect], streamed=streamed)
    _, chat_sent, chat_calls = await held(tmp_path / "chat", chat, streamed=False)
    assert answer == "two"
    assert sent == chat_sent
    assert [message["role"] for message in sent[1]["messages"]] == ["system", "user", "assistant", "tool"]
    assert sent[1]["messages"][2]["reasoning_content"] == "hm\n two?"
    assert [call.info.dialect for call in calls] == [dialect] * 2
    for call, same in zip(calls, chat_calls, strict=True):
        assert (call.info.trainable, call.info.reason) == (True, None)
        assert call.prompt_ids.tolist() == same.prompt_ids.tolist()
        assert call.sampled_ids.tolist() == same.sampled_ids.tolist()
        assert call.logprobs.tolist() == same.logprobs.tolist()
    assert calls[1].info.parent_id == calls[0].info.call_id
