"""Rollouts over several model servers, one of them killed in mid-run, and calls by other names than the policy's."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fakes.model_server import Answer, FakeModelServer
from fakes.running_gateway import RunningGateway, config, running_gateway


def pinned(gateway: RunningGateway, endpoint: str) -> list[str]:
    """Some rollouts that go to this server."""
    names = [f"r{number}" for number in range(100)]
    routed = {name: gateway.gateway.registry.route("policy", name) for name in names}
    return [name for name, model in routed.items() if model is not None and model.endpoint == endpoint][:4]


async def turn(gateway: RunningGateway, rollout_id: str, talk: list[Any]) -> None:
    body = {"model": "policy", "messages": talk}
    answer = await gateway.http.post(f"{gateway.base(rollout_id)}/chat/completions", json=body)
    assert answer.status_code == 200
    talk += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]


async def endpoints(gateway: RunningGateway, rollout_id: str) -> list[str]:
    """Which server answered each call of the rollout; all of them can be trained on."""
    calls = await gateway.calls(rollout_id)
    return [call.upstream.endpoint for call in calls if call.upstream is not None and call.info.trainable]


async def test_only_the_rollouts_of_a_killed_server_move_and_they_come_back(tmp_path: Path) -> None:
    talks: dict[str, list[Any]] = {}

    async def all_take_a_turn() -> None:
        await asyncio.gather(*(turn(gateway, name, talk) for name, talk in talks.items()))

    with FakeModelServer() as lives, ExitStack() as until_killed:
        dies = until_killed.enter_context(FakeModelServer())
        async with running_gateway(tmp_path) as gateway:
            for server in (lives, dies):
                gateway.register(server.url)
            moving = pinned(gateway, dies.url)
            for name in [*moving, *pinned(gateway, lives.url)]:
                await gateway.add(name)
                talks[name] = [{"role": "user", "content": name}]
            await all_take_a_turn()

            dies.script = [Answer(gated=True)]
            going = asyncio.create_task(all_take_a_turn())
            await asyncio.to_thread(dies.wait_for, lambda server: len(server.requests) == 2 * len(moving))
            until_killed.close()  # with their calls unanswered
            await going
            await all_take_a_turn()
            for name in talks:
                first = dies.url if name in moving else lives.url
                assert await endpoints(gateway, name) == [first, lives.url, lives.url]

            with FakeModelServer(port=dies.port) as back:
                gateway.register(back.url)
                await all_take_a_turn()
                for name in talks:
                    last = back.url if name in moving else lives.url
                    assert (await endpoints(gateway, name))[3] == last


async def test_names_mean_what_the_configuration_says_and_stand_in_the_record(tmp_path: Path) -> None:
    meanings = {"*haiku*": "side job", "gpt-*": "policy", "judge": "second"}
    with FakeModelServer() as model, FakeModelServer(model="second") as second:
        async with running_gateway(tmp_path, config(gateway={"models": meanings})) as gateway:
            gateway.register(model.url)
            await gateway.http.post("/api/models", json=[{"model": "second", "endpoint": second.url}])
            await gateway.add()
            asked = ["claude-haiku-4-5", "foreign", "gpt-5", "judge", "foreign"]
            for name in asked:
                body = {"model": name, "messages": [{"role": "user", "content": name}]}
                answer = await gateway.http.post(f"{gateway.base()}/chat/completions", json=body)
                assert answer.status_code == 200
            assert [request.body["model"] for request in model.requests] == ["policy"] * 4
            assert [request.body["model"] for request in second.requests] == ["second"]
            calls = [call.info for call in await gateway.calls()]
            assert [call.model for call in calls] == asked
            assert [call.reason for call in calls] == ["auxiliary", None, None, "auxiliary", "auxiliary"]
            assert [call.kind for call in calls] == ["auxiliary", "main", "main", "auxiliary", "auxiliary"]


async def test_what_was_asked_for_before_a_restart_still_counts(tmp_path: Path, model: FakeModelServer) -> None:
    settings = config(gateway={"models": {"gpt-*": "policy"}})
    for name in ("gpt-5", "foreign"):
        async with running_gateway(tmp_path, settings) as gateway:
            gateway.register(model.url)
            await gateway.add()
            body = {"model": name, "messages": [{"role": "user", "content": name}]}
            await gateway.http.post(f"{gateway.base()}/chat/completions", json=body)
            reasons = [call.info.reason for call in await gateway.calls()]
    assert reasons == [None, "auxiliary"]
