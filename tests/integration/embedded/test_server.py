"""The model server as the official client sees it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
import torch

from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.engine import Engine
from agl_runtime.trainer.backends.embedded.generation import Generation
from agl_runtime.trainer.backends.embedded.policy import Policy, load_policy
from agl_runtime.trainer.backends.embedded.requests import Limits
from agl_runtime.trainer.backends.embedded.server import ServerThread, create_app
from fakes.tiny_model import CALCULATOR

QUESTION: Any = [{"role": "user", "content": "What is 12+7?"}]
TOOLS: Any = [CALCULATOR]
IDS = {"return_token_ids": True}
PATIENCE_S = 60
KEY = "key-of-the-server"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def teacher_forced(policy: Policy, prompt: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt + sampled]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


def gap(policy: Policy, response: Any, temperature: float = 1.0) -> float:
    """Largest difference of told and recomputed log-probabilities in a whole chat answer."""
    differences = [0.0]
    for choice in response.choices:
        want = teacher_forced(policy, response.prompt_token_ids, choice.token_ids, temperature)
        told = [entry.logprob for entry in choice.logprobs.content]
        assert len(told) == len(want)
        differences += [abs(a - b) for a, b in zip(told, want, strict=True)]
    return max(differences)


async def test_models_and_health_name_the_policy(start: Any, noise: Path) -> None:
    _, model, client = await start(noise, run_epoch=3)
    assert [entry.id async for entry in client.models.list()] == ["policy"]
    async with httpx.AsyncClient() as http:
        health = await http.get(model.endpoint.removesuffix("/v1") + "/health", headers=bearer(client.api_key))
    assert health.json() == {"status": "ok", "version": "3.0"}


async def test_a_chat_answer_has_text_ids_logprobs_and_versions(start: Any, noise: Path) -> None:
    _, _, client = await start(noise)
    answer = await client.chat.completions.create(
        model="policy", messages=QUESTION, logprobs=True, top_logprobs=2, max_tokens=20, extra_body=IDS
    )
    choice, policy = answer.choices[0], load_policy(noise)
    codec = Codec(policy.tokenizer, policy.stop_ids)
    assert codec.decode(answer.prompt_token_ids).endswith("What is 12+7?<|im_end|>\n<|im_start|>assistant\n")
    assert choice.message.content == codec.decode(codec.visible(choice.token_ids))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len(answer.prompt_token_ids),
        len(choice.token_ids),
    )
    assert choice.weight_versions == [{"version": "1.0", "start": 0, "end": len(choice.token_ids)}]
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert gap(policy, answer) < 1e-4


async def test_a_prompt_is_counted_as_it_is_sampled_from(start: Any, noise: Path) -> None:
    _, model, client = await start(noise)
    answer = await client.chat.completions.create(model="policy", messages=QUESTION, tools=TOOLS, extra_body=IDS)
    url = model.endpoint.removesuffix("/v1") + "/tokenize"
    body = {"model": "policy", "messages": QUESTION, "tools": TOOLS}
    long = {**body, "messages": [{"role": "user", "content": "12+7 " * 2000}]}
    async with httpx.AsyncClient(headers=bearer(client.api_key)) as http:
        counted, of_long = (await http.post(url, json=body)).json(), (await http.post(url, json=long)).json()
    assert counted["tokens"] == answer.prompt_token_ids
    assert counted["count"] == answer.usage.prompt_tokens
    assert of_long["count"] > of_long["max_model_len"]


async def test_ids_and_logprobs_come_only_when_asked_for(start: Any, noise: Path) -> None:
    _, _, client = await start(noise)
    answer = await client.chat.completions.create(model="policy", messages=QUESTION, max_tokens=3)
    assert not hasattr(answer, "prompt_token_ids")
    assert not hasattr(answer.choices[0], "token_ids")
    assert answer.choices[0].logprobs is None


async def test_a_streamed_answer_adds_up_to_the_whole_one(start: Any, noise: Path) -> None:
    _, _, client = await start(noise)
    order: Any = {"model": "policy", "messages": QUESTION, "seed": 4, "max_tokens": 40, "logprobs": True}
    whole = await client.chat.completions.create(**order, extra_body=IDS)
    stream = await client.chat.completions.create(
        **order, stream=True, stream_options={"include_usage": True}, extra_body=IDS
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].usage == whole.usage
    rows = [chunk.choices[0] for chunk in chunks[:-1]]
    told = whole.choices[0]
    assert "".join(row.delta.content or "" for row in rows) == told.message.content
    assert [i for row in rows for i in getattr(row, "token_ids", [])] == told.token_ids
    logprobs = [entry.logprob for row in rows if row.logprobs for entry in row.logprobs.content]
    assert logprobs == pytest.approx([entry.logprob for entry in told.logprobs.content], abs=1e-4)
    assert [row.finish_reason for row in rows[:-1]] == [None] * (len(rows) - 1)
    assert (rows[-1].finish_reason, rows[-1].weight_versions) == (told.finish_reason, told.weight_versions)


async def test_tool_calls_come_out_and_render_to_the_sampled_ids_again(start: Any, caller: Path) -> None:
    _, _, client = await start(caller)
    first = await client.chat.completions.create(
        model="policy", messages=QUESTION, tools=TOOLS, temperature=0, extra_body=IDS
    )
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("calculator", '{"expression": "12+7"}')
    assert call.id.startswith("call_")

    said = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "19"}
    second = await client.chat.completions.create(
        model="policy", messages=[*QUESTION, said, result], tools=TOOLS, max_tokens=1, extra_body=IDS
    )
    before = first.prompt_token_ids + choice.token_ids
    assert second.prompt_token_ids[: len(before)] == before


async def test_streamed_tool_calls_are_never_told_as_text(start: Any, caller: Path) -> None:
    _, _, client = await start(caller)
    stream = await client.chat.completions.create(
        model="policy", messages=QUESTION, tools=TOOLS, temperature=0, stream=True, extra_body=IDS
    )
    rows = [chunk.choices[0] async for chunk in stream]
    assert "".join(row.delta.content or "" for row in rows) == "Let me see."
    [call] = [call for row in rows for call in row.delta.tool_calls or []]
    assert (call.index, call.function.arguments) == (0, '{"expression": "12+7"}')
    assert rows[-1].finish_reason == "tool_calls"


async def test_without_tools_the_same_text_is_content(start: Any, caller: Path) -> None:
    _, _, client = await start(caller)
    prompt = load_policy(caller).tokenizer.apply_chat_template(
        QUESTION, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    answer = await client.completions.create(model="policy", prompt=prompt, temperature=0, max_tokens=64)
    assert answer.choices[0].text.startswith('Let me see.\n<tool_call>\n{"name": "calculator"')


async def test_one_call_at_a_time_ends_the_answer_after_the_first(start: Any, caller: Path) -> None:
    _, _, client = await start(caller)
    answer = await client.chat.completions.create(
        model="policy", messages=QUESTION, tools=TOOLS, temperature=0, parallel_tool_calls=False, extra_body=IDS
    )
    tokenizer = load_policy(caller).tokenizer
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].token_ids[-1] == tokenizer.convert_tokens_to_ids("</tool_call>")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_the_text_and_leaves_the_ids(start: Any, caller: Path, stream: bool) -> None:
    _, _, client = await start(caller)
    answer = await client.chat.completions.create(
        model="policy", messages=QUESTION, tools=TOOLS, temperature=0, stop="me se", stream=stream, extra_body=IDS
    )
    if stream:
        rows = [chunk.choices[0] async for chunk in answer]
        text, ids = "".join(r.delta.content or "" for r in rows), [i for r in rows for i in getattr(r, "token_ids", [])]
        last = rows[-1]
    else:
        last = answer.choices[0]
        text, ids = last.message.content, last.token_ids
    assert (text, last.finish_reason, last.stop_reason) == ("Let ", "stop", "me se")
    assert load_policy(caller).tokenizer.decode(ids) == "Let me se"


async def test_several_choices_differ_and_repeat_with_a_seed(start: Any, noise: Path) -> None:
    _, _, client = await start(noise)

    async def texts(**changes: Any) -> list[str]:
        answer = await client.chat.completions.create(model="policy", messages=QUESTION, max_tokens=12, **changes)
        return [choice.message.content for choice in answer.choices]

    one, again = await texts(n=3, seed=9), await texts(n=3, seed=9)
    assert one == again
    assert len(set(one)) == 3
    assert await texts(seed=9) == one[:1]
    assert await texts(seed=10) != one[:1]


async def test_streamed_choices_are_told_apart(start: Any, noise: Path) -> None:
    _, _, client = await start(noise)
    order: Any = {"model": "policy", "messages": QUESTION, "n": 2, "seed": 1, "max_tokens": 12}
    whole = await client.chat.completions.create(**order)
    texts = ["", ""]
    async for chunk in await client.chat.completions.create(**order, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_put_ids_and_logprobs_in_their_places(start: Any, noise: Path, stream: bool) -> None:
    _, _, client = await start(noise)
    answer = await client.completions.create(
        model="policy", prompt=[65, 66], logprobs=1, max_tokens=6, temperature=0.8, stream=stream, extra_body=IDS
    )
    choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    ids = [i for choice in choices for i in getattr(choice, "token_ids", [])]
    logprobs = [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs]
    assert choices[0].prompt_token_ids == [65, 66]
    assert choices[-1].weight_versions == [{"version": "1.0", "start": 0, "end": len(ids)}]
    assert logprobs == pytest.approx(teacher_forced(load_policy(noise), [65, 66], ids, 0.8), abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "status", "param", "code"),
    [
        ({"presence_penalty": 1}, 400, "presence_penalty", "unsupported_value"),
        ({"tool_choice": "required", "tools": TOOLS}, 400, "tool_choice", "unsupported_value"),
        ({"extra_body": {"no_such_thing": 1}}, 400, "no_such_thing", "unknown_parameter"),
        ({"n": 0}, 400, "n", "invalid_value"),
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, None, "context_length_exceeded"),
        ({"stream": True, "temperature": -1}, 400, "temperature", "invalid_value"),
    ],
)
async def test_refusals_have_openais_shape(
    start: Any, noise: Path, changes: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    _, _, client = await start(noise)
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**{"model": "policy", "messages": QUESTION, **changes})
    error = caught.value
    assert (error.status_code, error.param, error.code) == (status, param, code)  # type: ignore[attr-defined]
    assert error.type == "invalid_request_error"  # type: ignore[attr-defined]


async def test_a_body_that_is_not_json_is_refused(start: Any, noise: Path) -> None:
    _, model, client = await start(noise)
    async with httpx.AsyncClient(headers=bearer(client.api_key)) as http:
        answer = await http.post(f"{model.endpoint}/chat/completions", content=b"{")
    assert answer.status_code == 400
    assert "is not JSON" in answer.json()["error"]["message"]


async def test_two_hundred_conversations_at_once_with_right_logprobs(start: Any, noise: Path) -> None:
    """Temperatures, stop strings, tools, several choices and streams mixed, more than are decoded at once."""
    _, _, client = await start(noise, max_batch=32)
    policy = load_policy(noise)

    async def ask(index: int) -> float:
        temperature = (1.0, 0.7, 1.3)[index % 3]
        messages: Any = [{"role": "user", "content": "word " * (index % 17)}]
        answer = await client.chat.completions.create(
            model="policy",
            messages=messages,
            temperature=temperature,
            max_tokens=4 + index % 20,
            n=1 + index % 2,
            logprobs=True,
            stop=["e", "10"] if index % 4 == 0 else None,
            tools=TOOLS if index % 5 == 0 else openai.omit,
            extra_body=IDS,
        )
        return gap(policy, answer, temperature)

    assert max(await asyncio.gather(*map(ask, range(200)))) < 1e-4


class WatchedEngine(Engine):
    """Keeps what was submitted, and says when something was."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.seen: list[Generation] = []
        self.begun = threading.Event()

    def submit(self, generation: Generation) -> None:
        self.seen.append(generation)
        super().submit(generation)
        self.begun.set()


@pytest.fixture
def narrow(noise: Path) -> Iterator[tuple[WatchedEngine, str]]:
    """A server that decodes one answer at a time, and whose answers only end at `max_tokens`."""
    policy = replace(load_policy(noise), stop_ids=frozenset())
    server = ServerThread()
    engine = WatchedEngine(policy, PolicyVersion(1, 0), max_batch=1, notify=server.notify)
    engine.start()
    limits = Limits(model="policy", max_tokens=2000, context=2048, vocabulary=302)
    yield engine, server.start(create_app(engine, Codec(policy.tokenizer, policy.stop_ids), limits, KEY))
    server.stop()
    engine.stop()
    server.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_place(narrow: tuple[WatchedEngine, str], stream: bool) -> None:
    engine, url = narrow
    body = {"model": "policy", "messages": QUESTION, "stream": stream}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, headers=bearer(KEY)) as http:
        abandoned = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await asyncio.to_thread(engine.begun.wait, PATIENCE_S)
        abandoned.cancel()
        after = await http.post("/v1/chat/completions", json={**body, "stream": False, "max_tokens": 2})
    assert after.json()["usage"]["completion_tokens"] == 2
    first = engine.seen[0]
    assert (first.cancelled, first.finish) == (True, None)
    assert len(first.ids) < 2000


async def exhausted(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer: Any = await client.chat.completions.create(model="policy", messages=QUESTION, stream=stream)
    async for _ in answer:
        pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_engine_is_an_error_to_the_client(
    narrow: tuple[WatchedEngine, str], monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    engine, url = narrow

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(Policy, "logits", fail)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.APIError, match="The model server failed or was stopped"):
            await exhausted(client, stream)
    assert engine.seen[0].finish == "error"


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"Authorization": KEY}, bearer("k\xe9y")])
async def test_without_the_key_nothing_is_served(narrow: tuple[WatchedEngine, str], headers: dict[str, str]) -> None:
    engine, url = narrow
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    async with httpx.AsyncClient(base_url=url, headers=raw) as http:
        listed = await http.get("/v1/models")
        answered = await http.post("/v1/chat/completions", json={"model": "policy", "messages": QUESTION})
    assert (listed.status_code, answered.status_code) == (401, 401)
    assert answered.json()["error"]["code"] == "invalid_api_key"
    assert engine.seen == []


async def test_each_start_has_a_key_of_its_own_that_is_not_shown(start: Any, noise: Path) -> None:
    _, first, one = await start(noise)
    _, _, other = await start(noise)
    assert one.api_key != other.api_key
    assert one.api_key not in f"{first} {first!r} {first.model_dump_json()}"


async def test_a_prompt_being_read_holds_up_nobody_and_one_whose_client_left_is_not_read(
    narrow: tuple[WatchedEngine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, read, render = threading.Event(), threading.Event(), [], Codec.render

    def slow(codec: Codec, messages: Any, *rest: Any) -> list[int]:
        read.append(messages[0]["content"])
        begun.set()
        go.wait(PATIENCE_S)
        return render(codec, messages, *rest)

    monkeypatch.setattr(Codec, "render", slow)
    sent = asyncio.Event()

    async def body(text: str) -> Any:
        message = {"role": "user", "content": text}
        yield orjson.dumps({"model": "policy", "messages": [message], "max_tokens": 1})
        sent.set()

    async with httpx.AsyncClient(base_url=narrow[1], timeout=20, headers=bearer(KEY)) as http:
        first = asyncio.create_task(http.post("/v1/chat/completions", content=body("first")))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        sent.clear()
        left = asyncio.create_task(http.post("/v1/chat/completions", content=body("left")))
        await sent.wait()
        assert (await http.get("/v1/models")).status_code == 200
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert (await http.get("/v1/models")).status_code == 200
        go.set()
        assert (await first).status_code == 200
        assert (await http.post("/v1/chat/completions", content=body("last"))).status_code == 200
    assert read == ["first", "last"]
