"""The trainer against a real gateway and its store over HTTP, with agents that really call the model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.client import GatewayClient
from agl_runtime.config import Project
from agl_runtime.part import Part
from agl_runtime.schemas import Rollout, RolloutState
from agl_runtime.trainer import modes
from agl_runtime.trainer.backends.base import Backend
from fakes.backend import FakeBackend
from fakes.model_server import FakeModelServer
from fakes.player import Player, playing
from fakes.running_gateway import ADMIN_KEY, RunningGateway, running_gateway
from fakes.training import KillAt, Killed, make_part, make_project, read_lines, read_summary


@pytest.fixture
def model() -> Iterator[FakeModelServer]:
    with FakeModelServer() as server:
        yield server


@dataclass
class Site:
    """A project, and where its gateway and model server are."""

    project: Project
    url: str
    endpoint: str

    def outside(self, backend: Backend) -> modes.Outside:
        async def connect(part: Part) -> GatewayClient:
            return GatewayClient(self.url, ADMIN_KEY, patience_s=20.0)

        return modes.Outside(make_backend=lambda config, policy: backend, connect=connect)

    async def train(self, kill: KillAt | None = None, stop: asyncio.Event | None = None) -> FakeBackend:
        backend = FakeBackend(self.endpoint, kill or KillAt())
        await modes.train(make_part(self.project), stop or asyncio.Event(), self.outside(backend))
        return backend

    def client(self) -> GatewayClient:
        return GatewayClient(self.url, ADMIN_KEY)


@contextlib.asynccontextmanager
async def site(folder: Path, model: FakeModelServer, **settings: str) -> AsyncIterator[tuple[Site, RunningGateway]]:
    async with running_gateway(folder) as gateway:
        project = make_project(folder / "project", {key.replace("__", "."): value for key, value in settings.items()})
        yield Site(project, gateway.url, model.url), gateway


def steps(project: Project) -> list[dict[str, Any]]:
    return [line for line in read_lines(project) if line["kind"] == "step"]


async def test_a_run_over_http_trains_on_what_the_agents_sampled(tmp_path: Path, model: FakeModelServer) -> None:
    async with site(tmp_path, model) as (here, _), playing(Player(here.url, ADMIN_KEY)) as player:
        backend = await here.train()
        async with here.client() as client:
            records = await client.checkpoints()
            proxy = await client.proxy_state()
    summary = read_summary(here.project)
    assert (summary["ended"], summary["steps"], summary["version"]) == ("complete", 3, "1.3")
    assert summary["before"]["rollouts"] == summary["after"]["rollouts"] == 2
    assert [len(ids) for ids in backend.weights] == [4, 4, 4]
    for line in steps(here.project):
        # Two calls a rollout make one row, whose sampled tokens are all trained: "ok" and its end are five of them.
        assert (line["samples"], line["sampled_tokens"], line["trained_share"]) == (4, 40, 1.0)
        assert (line["splits"], line["untrained"], line["agent_cpu_s"]) == ({}, {}, 0.5)
    assert sorted(record.version for record in records) == ["1.1", "1.2", "1.3"]
    assert sorted(name for record in records for name in record.rollout_ids) == sorted(
        name for name in player.played if "val" not in name
    )
    assert not proxy.paused


async def test_rollouts_that_fail_reach_the_trainer_with_their_reason(tmp_path: Path, model: FakeModelServer) -> None:
    async with (
        site(tmp_path, model, data__val="null", train__no_signal_steps="1") as (here, _),
        playing(Player(here.url, ADMIN_KEY, reward=lambda rollout: None)),
    ):
        await here.train()
    summary = read_summary(here.project)
    assert summary["ended"] == "no_signal"
    assert "most often because: The reward function raised." in summary["reason"]


async def test_a_gateway_that_is_started_again_in_mid_run_costs_nothing(tmp_path: Path, model: FakeModelServer) -> None:
    async with site(tmp_path, model, data__val="null") as (here, _):
        port = int(here.url.rpartition(":")[2])
        trainer = asyncio.create_task(here.train())
        async with here.client() as client:
            await waiting_rollouts(client, 4)
    async with running_gateway(tmp_path, port=port), playing(Player(here.url, ADMIN_KEY)) as player:
        backend = await trainer
    assert [len(ids) for ids in backend.weights] == [4, 4, 4]
    assert len(player.played) == len(set(player.played)) == 12


@pytest.mark.parametrize("killed", [False, True])
async def test_a_rollout_that_carries_over_is_trained_with_the_weights_of_each_of_its_tokens(
    killed: bool, tmp_path: Path, model: FakeModelServer
) -> None:
    chosen = {"train__steps": "2", "train__groups_per_step": "1", "train__active_groups": "2"}
    async with site(tmp_path, model, data__val="null", **chosen) as (here, gateway):

        async def wait_for_an_update(rollout: Rollout) -> None:
            while rollout.input["id"] == "train-0" and not any(
                model.version for model in gateway.gateway.registry.models()
            ):
                await asyncio.sleep(0.01)

        async with playing(Player(here.url, ADMIN_KEY, pause=wait_for_an_update)), here.client() as client:
            if killed:  # after the update, before it is saved: the second calls see weights that are then lost
                with pytest.raises(Killed):
                    await here.train(KillAt(1, "save"))
                async with asyncio.timeout(20):
                    while (await client.terminal(0, wait_s=5)).total_terminal < 4:
                        pass
            backend = await here.train()
            names = [name for ids in backend.weights for name in ids if name.split("-")[2] == "0"]
            spans = [span for name in names for call in (await client.calls(name)).calls for span in call.spans]
    assert {str(span.version) for span in spans} == {"1.0", "1.1"}
    assert sorted(map(sorted, backend.sampled_by)) == ([[-1, 0], [0]] if killed else [[0], [0, 1]])
    figures = [(line["staleness_mean"], line["staleness_max"]) for line in steps(here.project)]
    assert figures == [(0, 0), (1, 1)]


async def waiting_rollouts(client: GatewayClient, count: int) -> list[str]:
    async with asyncio.timeout(20):
        while True:
            found = await client.rollouts([RolloutState.QUEUING])
            if len(found) == count:
                return [item.rollout_id for item in found]
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("active", ["2", "4"])
@pytest.mark.parametrize("name", ["start", "update", "updated", "save", "saving", "saved"])
async def test_a_trainer_killed_around_an_update_trains_the_same_rollouts_once(
    name: str, active: str, tmp_path: Path, model: FakeModelServer
) -> None:
    async with (
        site(tmp_path, model, data__val="null", train__active_groups=active) as (here, _),
        playing(Player(here.url, ADMIN_KEY)) as player,
    ):
        with pytest.raises(Killed):
            await here.train(KillAt(1 if name == "start" else 2, name))
        backend = await here.train()
        async with here.client() as client:
            counts = await client.counts()
    trained = [rollout for ids in backend.weights for rollout in ids]
    assert len(trained) == len(set(trained)) == 12
    assert sorted(player.played) == sorted(trained)
    assert counts["rollouts.succeeded"] == 12
    assert [line["step"] for line in steps(here.project)] == [1, 2, 3]


async def test_eval_measures_the_newest_checkpoint_or_another_policy(tmp_path: Path, model: FakeModelServer) -> None:
    async with site(tmp_path, model) as (here, _), playing(Player(here.url, ADMIN_KEY, reward=lambda rollout: 1.0)):
        part, made = make_part(here.project), []

        def make(config: Any, policy: Path) -> Backend:
            made.append(policy)
            return FakeBackend(model.url)

        outside = modes.Outside(make, here.outside(FakeBackend()).connect)
        await modes.evaluate(part, asyncio.Event(), outside, samples=3)
        content = read_summary(here.project)
        await modes.evaluate(part, asyncio.Event(), outside, policy=here.project.root / "base")
    assert made == [here.project.root / "base"] * 2
    assert (content["mode"], content["ended"], content["before"]) == ("eval", "complete", None)
    assert (content["after"]["pass_at_1"], content["after"]["tasks"], content["after"]["rollouts"]) == (1.0, 2, 6)


async def test_eval_of_a_server_that_agl_does_not_run_needs_no_backend(tmp_path: Path, model: FakeModelServer) -> None:
    async with (
        site(tmp_path, model, model__endpoint=model.url, model__path="null") as (here, _),
        playing(Player(here.url, ADMIN_KEY)),
    ):

        def none(config: Any, policy: Path) -> Backend:
            raise AssertionError("no backend is wanted")

        outside = modes.Outside(none, here.outside(FakeBackend()).connect)
        await modes.evaluate(make_part(here.project), asyncio.Event(), outside, samples=2)
    content = read_summary(here.project)
    assert content["after"]["pass_at_1"] == 0.5
    assert content["checkpoint"] is None


async def test_serve_answers_agents_until_it_is_stopped(tmp_path: Path, model: FakeModelServer) -> None:
    async with site(tmp_path, model) as (here, gateway):
        stop, backend = asyncio.Event(), FakeBackend(model.url)
        serving = asyncio.create_task(modes.serve(make_part(here.project), stop, here.outside(backend)))
        await gateway.add()
        async with here.client() as client:
            async with asyncio.timeout(20):
                while not any(part.part == "trainer" for part in await client.parts()):
                    await asyncio.sleep(0.02)
            answer = await gateway.http.post(
                f"{gateway.base()}/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]}
            )
            states = [part.state for part in await client.parts() if part.part == "trainer"]
        stop.set()
        await serving
    assert answer.json()["choices"][0]["message"]["content"] == "ok"
    assert states == ["serving"]
    assert backend.is_stopped
