"""Whatever bytes an agent sends, the gateway answers in the dialect's shape and blames nobody else."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_runtime.calls import decode
from fakes.fuzzing import BODIES, faults_of, json_values
from fakes.model_server import FakeModelServer
from fakes.running_gateway import ADMIN_KEY, running_gateway

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
fields = st.sampled_from(
    ["model", "messages", "prompt", "input", "stream", "stream_options", "tools", "n", "logprobs", "top_p", "system",
     "response_format", "tool_choice", "return_token_ids", "temperature", "logit_bias", "max_tokens", "\0", "agl"]
)  # fmt: skip
headers = st.dictionaries(st.just("x-stainless-retry-count"), st.sampled_from(["", "0", "1", "x", "-1"]), max_size=1)


CHAT = "openai/v1/chat/completions"
HEADERS = {"x-api-key": ADMIN_KEY, "content-type": "application/json"}


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a gateway in a thread of its own, shared by all examples."""
    started, stop, found = threading.Event(), threading.Event(), []

    async def serve(folder: Path) -> None:
        with FakeModelServer() as model:
            async with running_gateway(folder) as gateway:
                gateway.register(model.url)
                await gateway.add()
                found.append(gateway.base(api=""))
                started.set()
                await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve(tmp_path_factory.mktemp("fuzz"))), daemon=True)
    thread.start()
    assert started.wait(20)
    with httpx.Client(base_url=found[0], headers=HEADERS, timeout=30) as http:
        yield http
    stop.set()
    thread.join(20)


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400), (response.status_code, response.text[:300])
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert isinstance(error["message"], str)
        assert error["message"].endswith(".")


@pytest.mark.parametrize("path", BODIES)
def test_bodies_of_json(agent: httpx.Client, path: str) -> None:
    @SETTINGS
    @given(body=BODIES[path] | st.dictionaries(fields, json_values, max_size=6), extra=headers)
    def ask(body: Any, extra: dict[str, str]) -> None:
        check(agent.post(f"/{path}", content=orjson.dumps(body), headers=extra))

    ask()


@SETTINGS
@given(content=st.binary(max_size=200) | json_values.map(orjson.dumps), path=st.sampled_from(list(BODIES)))
def test_bodies_of_bytes(agent: httpx.Client, content: bytes, path: str) -> None:
    check(agent.post(f"/{path}", content=content))


@pytest.mark.parametrize("depth", [200, 240, 260, 900, 5_000, 100_000])
@pytest.mark.parametrize("key", ["metadata", "tools", "content"])
def test_deep_bodies(agent: httpx.Client, depth: int, key: str) -> None:
    deep = "[" * depth + "]" * depth
    message = f'{{"role": "user", "content": {deep if key == "content" else "1"}}}'
    extra = "" if key == "content" else f', "{key}": {deep}'
    check(agent.post(f"/{CHAT}", content=f'{{"messages": [{message}]{extra}}}'))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1" * 400, "-" + "9" * 30, "1e-400"])
def test_odd_numbers(agent: httpx.Client, number: str) -> None:
    check(agent.post(f"/{CHAT}", content=f'{{"messages": [{{"role": "user"}}], "seed": {number}}}'))


@pytest.mark.parametrize("text", [r"\ud800", r"\u0000", "\x00", r"\ud83d\ude00", "\u2028", "\ufffe"])
def test_odd_texts(agent: httpx.Client, text: str) -> None:
    check(agent.post(f"/{CHAT}", content=f'{{"messages": [{{"role": "user", "content": "{text}"}}]}}'))


ODD_VALUES = ["NaN", "-Infinity", r'"\ud800"', "[" * 300 + "]" * 300, "1" * 400, "{"]
CONTROL = {
    "/api/rollouts": '[{"input": VALUE}]',
    "/api/rollouts/r1/attempt/0/events": '{"event_type": "reward", "data": {"value": VALUE}}',
    "/api/parts": '{"part": "trainer", "pid": 1, "state": "x", "detail": {"a": VALUE}}',
}


@pytest.mark.parametrize("value", ODD_VALUES)
@pytest.mark.parametrize("path", CONTROL)
def test_what_could_not_be_told_again_is_refused_at_the_door(agent: httpx.Client, path: str, value: str) -> None:
    url = agent.base_url.copy_with(path=path)
    response = agent.post(url, content=CONTROL[path].replace("VALUE", value))
    assert (response.status_code, response.json()["detail"][0]["type"]) == (422, "json_invalid")


@SETTINGS
@given(value=json_values)
def test_any_json_is_kept_and_told_again(agent: httpx.Client, value: Any) -> None:
    event = {"event_type": "note", "data": {"value": value}, "event_id": str(uuid.uuid4())}
    posted = agent.post(agent.base_url.copy_with(path="/api/rollouts/r1/attempt/0/events"), content=orjson.dumps(event))
    assert (posted.status_code, posted.json()["data"]) == (200, {"value": value})


@pytest.mark.parametrize("tail", ["events", "events?format=triplet", "calls", "calls?format=json"])
def test_whatever_was_taken_in_can_be_read(agent: httpx.Client, tail: str) -> None:
    deep = "[" * 200 + "]" * 200
    check(agent.post(f"/{CHAT}", content=f'{{"messages": [{{"role": "user"}}], "metadata": {deep}}}'))
    root = str(agent.base_url.copy_with(path="/api/rollouts/r1/"))
    read = agent.get(root + tail)
    assert read.status_code == 200
    if tail == "calls":
        assert faults_of(decode(read.content)) == []
