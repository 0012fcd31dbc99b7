"""What makes a call trainable or not holds in every dialect, streamed and not: the reason on record, what the agent is
told, and how often the model server was asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_cli import recorded
from agl_cli.commands.rollouts import render
from agl_runtime.client import GatewayClient
from agl_runtime.config import Project
from fakes.dialects import TALK, WAYS, WITH_TOOLS, Way, in_every_way, in_every_way_with_tools
from fakes.model_server import Answer, FakeModelServer, Raw, tool_call
from fakes.running_gateway import ADMIN_KEY, RunningGateway, config

FLAWS = [
    (Answer(ids="null"), "no_sampled_ids"),
    (Answer(ids="absent"), "no_sampled_ids"),
    (Answer(ids="empty"), "no_sampled_ids"),
    (Answer(ids="short"), "ids_missing"),
    (Answer(prompt_ids="null"), "no_prompt_ids"),
    (Answer(prompt_ids="absent"), "no_prompt_ids"),
    (Answer(prompt_ids="empty"), "no_prompt_ids"),
    (Answer(prompt_ids="short"), "ids_missing"),
    (Answer(logprobs="absent"), "no_logprobs"),
    (Answer(logprobs="short"), "logprobs_length"),
    (Answer(logprobs="nan"), "logprobs_not_finite"),
    (Answer(model="another"), "wrong_model"),
    (Answer(text=""), "empty_generation"),
    (Answer(versions=[{"version": "1.3", "start": 0, "end": 1}]), "mixed_versions"),
]
OVERFLOW = {"error": {"message": "This model's maximum context length is 8 tokens.", "code": 400}}


async def reasons(gateway: RunningGateway, rollout_id: str = "r1") -> list[str | None]:
    return [call.info.reason for call in await gateway.calls(rollout_id)]


async def failures(gateway: RunningGateway) -> list[str]:
    return [event.event_type for event in await gateway.store.events("r1")]


async def seen(model: FakeModelServer, count: int) -> None:
    await asyncio.to_thread(model.wait_for, lambda server: len(server.requests) == count)


@in_every_way
async def test_an_answer_with_a_flaw_reaches_the_agent_and_its_reason_every_reader(
    gateway: RunningGateway, model: FakeModelServer, way: Way, capsys: pytest.CaptureFixture[str]
) -> None:
    project = Project(Path(), config(), {})
    for number, (answer, reason) in enumerate(FLAWS):
        name = f"flaw{number}"
        await gateway.add(name)
        model.script = [answer]
        reply = await way.ask(gateway, name)
        assert way.is_whole(reply), reply.text
        assert way.stream or answer.text in reply.text
        assert await reasons(gateway, name) == [reason]
        async with GatewayClient(gateway.url, ADMIN_KEY) as client:
            render(await recorded.fetch(client, name, project), as_json=False)
        shown = capsys.readouterr().out
        assert f"no: {reason}" in shown
        assert f"untrained: 1 because of {reason}" in shown
    told = (await gateway.http.get("/metrics")).text
    counts = (await gateway.http.get("/api/counts")).json()
    for reason in {reason for _, reason in FLAWS}:
        count = [found for _, found in FLAWS].count(reason)
        assert f'agl_calls{{reason="{reason}"}} {count}\n' in told
        assert counts[f"calls.{reason}"] == count


@in_every_way
async def test_a_stream_that_is_cut_or_never_finished_is_no_clean_stop_and_an_infrastructure_failure(
    gateway: RunningGateway, model: FakeModelServer, way: Way
) -> None:
    model.script = [Answer("a long answer", fault="cut" if way.stream else None, finish_reason="abort")]
    reply = await way.ask(gateway)
    assert reply.status_code == (200 if way.stream else 502)
    assert not way.is_whole(reply)
    assert way.error_of(reply).startswith("The model server")
    (call,) = await gateway.calls()
    assert (call.info.reason, call.info.http_status) == ("cut" if way.stream else "error", 502)
    assert not call.info.trainable
    assert await failures(gateway) == ["upstream_failure"]


@in_every_way
async def test_an_agent_that_leaves_ends_the_generation_and_its_part_is_not_trained(
    gateway: RunningGateway, model: FakeModelServer, way: Way
) -> None:
    model.script = [Answer("some words", gated=not way.stream, gated_end=way.stream)]
    async with httpx.AsyncClient(headers=gateway.http.headers, timeout=30) as agent:
        asking = asyncio.create_task(agent.post(way.url(gateway), json=way.body))
        await seen(model, 1)
        asking.cancel()
        await asyncio.to_thread(model.wait_for, lambda server: server.cancelled == 1)
    assert await reasons(gateway) == ["cut"]
    assert await failures(gateway) == []
    assert (await gateway.http.get("/proxy/state")).json()["inflight"] == 0


@in_every_way
async def test_faults_before_the_first_byte_are_tried_again_and_make_one_call(
    gateway: RunningGateway, model: FakeModelServer, way: Way
) -> None:
    model.script = [Answer(status=500), Answer(fault="drop"), Answer(status=429), Answer("fine")]
    reply = await way.ask(gateway)
    assert way.is_whole(reply)
    (call,) = await gateway.calls()
    # A kept connection may be closed as it is used again: what is dropped on one is asked anew, and is no try.
    assert (len(model.requests), call.retry_count, call.info.trainable) == (4, 2, True)
    assert await failures(gateway) == []


@in_every_way
async def test_a_resend_with_a_mark_joins_or_repeats_and_one_without_is_another_call(
    gateway: RunningGateway, model: FakeModelServer, way: Way
) -> None:
    model.script = [Answer("words", gated=True)]
    first = asyncio.create_task(way.ask(gateway))
    await seen(model, 1)
    joined = asyncio.create_task(way.ask(gateway, marked=True))
    (running,) = gateway.gateway.attempts.all_running()
    async with asyncio.timeout(20):
        while running.exchange.readers < 2:
            await asyncio.sleep(0.01)
    twin = asyncio.create_task(way.ask(gateway))
    await seen(model, 2)
    model.release()
    replies = [await first, await joined, await twin, await way.ask(gateway, marked=True)]
    assert all(way.is_whole(reply) for reply in replies)
    assert replies[0].content == replies[1].content
    assert len(model.requests) == 2
    calls = await gateway.calls()
    assert [(call.info.trainable, call.info.delivered) for call in calls] == [(True, True)] * 2


@in_every_way
async def test_an_overflow_is_the_agents_limit_in_its_own_words(
    gateway: RunningGateway, model: FakeModelServer, way: Way
) -> None:
    model.script = [Answer(status=400, error=OVERFLOW)]
    reply = await way.ask(gateway)
    assert reply.status_code == 400
    if way.dialect == "messages":
        assert way.error_of(reply).startswith("prompt is too long")
    else:
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert (len(model.requests), await reasons(gateway), await failures(gateway)) == (1, ["context_overflow"], [])


@in_every_way
async def test_a_call_on_record_whose_answer_never_arrived_is_undelivered(
    gateway: RunningGateway, model: FakeModelServer, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = gateway.store.commit_call
    async with httpx.AsyncClient(headers=gateway.http.headers, timeout=30) as agent:
        asking = asyncio.create_task(agent.post(way.url(gateway), json=way.body))

        async def while_it_leaves(commit: Any) -> None:
            (call,) = gateway.gateway.attempts.all_running()
            asking.cancel()
            while call.exchange.readers:
                await asyncio.sleep(0.01)
            await at_once(commit)

        monkeypatch.setattr(gateway.store, "commit_call", while_it_leaves)
        with pytest.raises(asyncio.CancelledError):
            await asking
    (call,) = await gateway.calls()
    assert (call.info.committed, call.info.trainable, call.info.reason) == (True, False, "undelivered")
    assert 'agl_calls{reason="undelivered"} 1\n' in (await gateway.http.get("/metrics")).text


@in_every_way
async def test_a_straggler_after_sealing_is_refused_for_good_and_leaves_no_trace(
    gateway: RunningGateway, model: FakeModelServer, way: Way
) -> None:
    await gateway.http.post("/api/rollouts/r1/attempt/0/seal")
    late = await way.ask(gateway)
    assert (late.status_code, late.headers["x-should-retry"]) == (409, "false")
    assert way.error_of(late) == "Attempt 0 has ended; its late calls are refused."
    assert (model.requests, await gateway.store.calls("r1")) == ([], [])


@in_every_way
async def test_weights_that_change_under_a_call_make_it_untrainable(
    gateway: RunningGateway, model: FakeModelServer, way: Way
) -> None:
    model.script = [Answer("some words", gated=not way.stream, gated_end=way.stream)]
    asking = asyncio.create_task(way.ask(gateway))
    await seen(model, 1)
    gateway.register(model.url, version=4, run_epoch=1)
    model.release()
    assert way.is_whole(await asking)
    assert await reasons(gateway) == ["mixed_versions"]


@pytest.mark.parametrize("way", WAYS[::2], ids=str)
async def test_a_body_that_is_no_object_is_refused_with_a_sentence(gateway: RunningGateway, way: Way) -> None:
    for raw in (b"[]", b"null", b'"x"', b"3", b"{", b"\xff", b""):
        reply = await gateway.http.post(way.url(gateway), content=raw)
        assert (reply.status_code, way.error_of(reply)[-1]) == (400, "."), raw
    assert await gateway.store.calls("r1") == []


@in_every_way_with_tools
async def test_a_call_that_the_token_limit_cut_off_is_told_as_cut_off_and_trained(
    gateway: RunningGateway, model: FakeModelServer, way: Way
) -> None:
    half = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "half'}}
    model.script = [Answer("", tool_calls=[half], finish_reason="length")]
    reply = await way.ask(gateway)
    marks = {"chat": '"finish_reason":"length"', "responses": '"reason":"max_output_tokens"'}
    assert marks.get(way.dialect, '"stop_reason":"max_tokens"') in reply.text
    assert await reasons(gateway) == [None]


def next_body(way: Way, call_id: str) -> Raw:
    """The request that follows an answer which called f, as a harness that names calls by their ids writes it."""
    if way.dialect == "responses":
        call = {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"}
        return {"input": [*TALK, call, {"type": "function_call_output", "call_id": call_id, "output": "2"}]}
    if way.dialect == "messages":
        use = {"type": "tool_use", "id": call_id, "name": "f", "input": {}}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": "2"}
        return {"messages": [*TALK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]}
    said = {"role": "assistant", "tool_calls": [tool_call("f", {}, call_id)]}
    return {"messages": [*TALK, said, {"role": "tool", "tool_call_id": call_id, "content": "2"}]}


def call_id_in(way: Way, reply: httpx.Response) -> str:
    """The id of the only tool call that the agent was told of."""
    key = {"responses": b'"call_id":"', "messages": b'"tool_use","id":"', "chat": b'"id":"call_'}[way.dialect]
    rest = reply.content.split(key, 1)[1].split(b'"', 1)[0].decode()
    return f"call_{rest}" if way.dialect == "chat" else rest


@in_every_way_with_tools
@pytest.mark.parametrize("missing", ["", None])
async def test_a_call_without_an_id_gets_one_by_which_the_next_call_is_linked(
    gateway: RunningGateway, model: FakeModelServer, way: Way, missing: Any
) -> None:
    model.script = [Answer("", tool_calls=[{**tool_call("f", {}), "id": missing}]), Answer("two")]
    call_id = call_id_in(way, await way.ask(gateway))
    assert way.is_whole(await way.ask(gateway, **next_body(way, call_id)))
    first, second = await gateway.calls()
    assert second.info.parent_id == first.info.call_id
    assert model.requests[1].body["messages"][1]["tool_calls"][0]["id"] == call_id


@pytest.mark.parametrize("way", [way for way in WITH_TOOLS if way.dialect != "chat"], ids=str)
async def test_what_marks_a_cache_does_not_reach_the_model_server(
    gateway: RunningGateway, model: FakeModelServer, way: Way
) -> None:
    """Chat bodies go on as they are: model servers take of a part its text alone."""
    part = {"type": "input_text" if way.dialect == "responses" else "text", "text": "x"}
    for mark in ({}, {"cache_control": {"type": "ephemeral"}}):
        talk = [{"role": "user", "content": [{**part, **mark}]}]
        await way.ask(gateway, **{"input" if way.dialect == "responses" else "messages": talk})
    marked, plain = model.requests
    assert marked.body == plain.body
