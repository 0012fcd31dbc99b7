"""One conversation, held by each dialect's official client in its own words, as an agent with one tool holds it: its
tool is called as long as the model asks for that."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import openai

from fakes.running_gateway import RunningGateway

Raw = dict[str, Any]


@dataclass(frozen=True)
class Talk:
    """`tool` is a function as chat has it (name, description, parameters), `result` what it always gives, `image` a
    data URL."""

    question: str
    tool: Raw | None = None
    result: str = ""
    system: str = ""
    image: str = ""
    max_tokens: int = 64


@dataclass(frozen=True)
class Said:
    """One answer: its text, the name and arguments of each call in it, and what was thought before."""

    text: str
    calls: tuple[tuple[str, Raw], ...] = ()
    thought: str = ""


async def chat(gateway: RunningGateway, talk: Talk, *, streamed: bool) -> list[Said]:
    text: Raw = {"type": "text", "text": talk.question}
    image: Raw = {"type": "image_url", "image_url": {"url": talk.image}}
    messages: list[Any] = [{"role": "system", "content": talk.system}] if talk.system else []
    messages.append({"role": "user", "content": [text, image] if talk.image else talk.question})
    asked: Any = {"model": "policy", "messages": messages, "max_tokens": talk.max_tokens}
    asked |= {"tools": [{"type": "function", "function": talk.tool}]} if talk.tool else {}
    said: list[Said] = []
    async with openai.AsyncOpenAI(base_url=gateway.base(), api_key=gateway.key(), max_retries=0) as client:
        while not said or said[-1].calls:
            if streamed:
                message = await _streamed_chat(client, asked)
            else:
                message = (await client.chat.completions.create(**asked)).choices[0].message
            kept = {"role", "content", "reasoning_content", "reasoning", "tool_calls"}
            dumped = message.model_dump(include=kept, exclude_none=True)
            calls = dumped.get("tool_calls", [])
            for call in calls:
                call.pop("index", None)
                call["function"].pop("parsed_arguments", None)
            results = [{"role": "tool", "tool_call_id": call["id"], "content": talk.result} for call in calls]
            messages += [dumped, *results]
            functions = [call["function"] for call in calls]
            called = tuple((function["name"], json.loads(function["arguments"])) for function in functions)
            thought = dumped.get("reasoning_content") or dumped.get("reasoning") or ""
            said.append(Said(message.content or "", called, thought))
    return said


async def _streamed_chat(client: openai.AsyncOpenAI, asked: Any) -> Any:
    try:
        async with client.chat.completions.stream(**asked) as stream:
            return (await stream.get_final_completion()).choices[0].message
    except openai.LengthFinishReasonError as cut:  # which this client takes for an error
        return cut.completion.choices[0].message


async def responses(gateway: RunningGateway, talk: Talk, *, streamed: bool) -> list[Said]:
    content: list[Raw] = [{"type": "input_text", "text": talk.question}]
    content += [{"type": "input_image", "image_url": talk.image, "detail": "auto"}] if talk.image else []
    items: list[Any] = [{"role": "user", "content": content if talk.image else talk.question}]
    asked: Any = {"model": "policy", "input": items, "store": False, "max_output_tokens": talk.max_tokens}
    asked |= {"instructions": talk.system} if talk.system else {}
    asked |= {"tools": [{"type": "function", **talk.tool, "strict": None}]} if talk.tool else {}
    said: list[Said] = []
    async with openai.AsyncOpenAI(base_url=gateway.base(), api_key=gateway.key(), max_retries=0) as client:
        while not said or said[-1].calls:
            if streamed:
                async with client.responses.stream(**asked) as stream:
                    events = [event async for event in stream]
                response: Any = getattr(events[-1], "response", None)
            else:
                response = await client.responses.create(**asked)
            items += [item.model_dump(exclude_none=True) for item in response.output]
            called = [item for item in response.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": c.call_id, "output": talk.result} for c in called]
            calls = tuple((c.name, json.loads(c.arguments)) for c in called)
            thoughts = [part.text for item in response.output if item.type == "reasoning" for part in item.content]
            said.append(Said(response.output_text, calls, "".join(thoughts)))
    return said


async def messages(gateway: RunningGateway, talk: Talk, *, streamed: bool) -> list[Said]:
    cached = {"cache_control": {"type": "ephemeral"}}
    source = {"type": "base64", "media_type": "image/png", "data": talk.image.partition(",")[2]}
    content: list[Raw] = [{"type": "text", "text": talk.question}]
    content += [{"type": "image", "source": source}] if talk.image else []
    turns: list[Any] = [{"role": "user", "content": content if talk.image else talk.question}]
    asked: Any = {"model": "policy", "max_tokens": talk.max_tokens, "messages": turns}
    asked |= {"system": [{"type": "text", "text": talk.system, **cached}]} if talk.system else {}
    if talk.tool:
        about = {key: value for key, value in talk.tool.items() if key != "parameters"}
        asked["tools"] = [{**about, "input_schema": talk.tool["parameters"]}]
    said: list[Said] = []
    base = gateway.base(api="anthropic")
    async with anthropic.AsyncAnthropic(base_url=base, api_key=gateway.key(), max_retries=0) as client:
        while not said or said[-1].calls:
            if streamed:
                async with client.messages.stream(**asked) as stream:
                    message: Any = await stream.get_final_message()
            else:
                message = await client.messages.create(**asked)
            turns.append(message.to_param())
            called = [block for block in message.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": c.id, "content": talk.result, **cached} for c in called]
            turns += [{"role": "user", "content": results}] if results else []
            texts = [block.text for block in message.content if block.type == "text"]
            thoughts = [block.thinking for block in message.content if block.type == "thinking"]
            said.append(Said("".join(texts), tuple((c.name, c.input) for c in called), "".join(thoughts)))
    return said


Speaker = Callable[..., Awaitable[list[Said]]]
SPEAKERS: dict[str, Speaker] = {"chat": chat, "responses": responses, "messages": messages}
