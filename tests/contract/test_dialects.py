"""One conversation (an image, reasoning, a tool, two turns) through every dialect is one record.

Each dialect's official client holds it in its own words, streamed and not. What the model server is sent and which
tokens are recorded are the same for all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agl_cli import recorded
from agl_cli.history import asked, conversation, is_rewritten
from agl_runtime.calls import Call
from agl_runtime.client import GatewayClient
from agl_runtime.config import Project
from fakes.model_server import Answer, FakeModelServer, Raw, tool_call
from fakes.running_gateway import ADMIN_KEY, config, running_gateway
from fakes.speakers import SPEAKERS, Speaker, Talk

TALK = Talk(
    question="what is on it?",
    image="data:image/png;base64,iVBORw0KGgo=",
    system="be brief",
    tool={
        "name": "count",
        "description": "Counts.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
    result="2",
)
UNLIKE = ("stream", "stream_options")
SCRIPT = [Answer("Counting. ", reasoning="hm\n two?", tool_calls=[tool_call("count", {"a": 1}, "c1")]), Answer("two")]


async def held(folder: Path, speak: Speaker, *, streamed: bool) -> tuple[str, list[Raw], list[Call]]:
    """The last answer, what the model server was sent, and what is on record."""
    folder.mkdir()
    with FakeModelServer(SCRIPT) as model:
        async with running_gateway(folder, config()) as gateway:
            gateway.register(model.url, version=3, run_epoch=1)
            await gateway.add()
            said = await speak(gateway, TALK, streamed=streamed)
            calls = (await gateway.recorded()).calls
    sent = [{k: v for k, v in asked.body.items() if k not in UNLIKE} for asked in model.requests]
    return said[-1].text, sent, list(calls)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", SPEAKERS)
async def test_a_conversation_is_the_same_in_every_dialect(tmp_path: Path, dialect: str, streamed: bool) -> None:
    answer, sent, calls = await held(tmp_path / "this", SPEAKERS[dialect], streamed=streamed)
    _, chat_sent, chat_calls = await held(tmp_path / "chat", SPEAKERS["chat"], streamed=False)
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


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", SPEAKERS)
async def test_what_an_official_client_sends_back_is_no_rewritten_history(
    tmp_path: Path, model: FakeModelServer, dialect: str, streamed: bool
) -> None:
    model.script = list(SCRIPT)
    async with running_gateway(tmp_path, config()) as gateway:
        gateway.register(model.url, version=3, run_epoch=1)
        await gateway.add()
        await SPEAKERS[dialect](gateway, TALK, streamed=streamed)
        async with GatewayClient(gateway.url, ADMIN_KEY) as client:
            item = await recorded.fetch(client, "r1", Project(Path(), config(), {}))
    first, second = item.requests.values()
    assert not is_rewritten(conversation(first), asked(second))
    assert is_rewritten(conversation(first), {**asked(second), "tools": []})
    without_samples = replace(item, samples=replace(item.samples, samples=()))
    assert without_samples.leaves == item.leaves == list(item.requests)[1:]
