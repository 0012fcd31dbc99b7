"""The controller as a process, with the real gateway and its store."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.client import GatewayClient
from agl_runtime.config import Project
from agl_runtime.part import KEY_FILE, announce_gateway
from agl_runtime.schemas import RolloutCreate, RolloutState
from fakes.agents import PYTHON, SANDBOXES, WAYS, Way, isolation, make_project, processes_with, until
from fakes.model_server import Answer, FakeModelServer
from fakes.running_gateway import ADMIN_KEY, RunningGateway, running_gateway

REWARD = {"reward.py": "def reward(exit, output):\n    return {'reward': exit.code == 0, 'said': len(output.stdout)}\n"}
JUDGED = {"reward": {"function": "reward.py:reward", "python": PYTHON}}
ASK = """
import json, os, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request, timeout=60) as response:
    print(json.load(response)["choices"][0]["message"]["content"])
"""


@dataclass
class World:
    project: Project
    gateway: RunningGateway
    client: GatewayClient

    async def start(self) -> asyncio.subprocess.Process:
        argv = (sys.executable, "-m", "agl_runtime.controller", "--root", str(self.project.root))
        return await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE)

    async def add(self, count: int, task: Any = None) -> list[str]:
        items = [RolloutCreate(rollout_id=f"r{n}", input=task or {"q": "hi"}) for n in range(count)]
        return [rollout.rollout_id for rollout in await self.client.add_rollouts(items)]

    async def ended(self, count: int) -> None:
        async with asyncio.timeout(120):
            while (await self.client.terminal(0, wait_s=20)).total_terminal < count:
                pass

    async def events(self, rollout_id: str = "r0") -> dict[str, dict[str, Any]]:
        return {event.event_type: event.data for event in await self.client.events(rollout_id)}


@asynccontextmanager
async def world(root: Path, files: dict[str, str], **settings: Any) -> AsyncIterator[World]:
    project = make_project(root, files, **settings)
    project.state_dir.mkdir(mode=0o700)
    (project.state_dir / KEY_FILE).write_text(ADMIN_KEY)
    async with running_gateway(project.state_dir, project.config) as gateway:
        announce_gateway(project.state_dir, gateway.url)
        async with GatewayClient(gateway.url, ADMIN_KEY) as client:
            yield World(project, gateway, client)


@asynccontextmanager
async def controller(here: World) -> AsyncIterator[asyncio.subprocess.Process]:
    """Stopped gracefully at the end, and then it must have ended well."""
    process = await here.start()
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(60):
            _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


def settings_of(way: Way) -> dict[str, Any]:
    return {"isolation": "off" if way in ("none", "warm") else "required", "warm": way.startswith("warm")}


@pytest.mark.parametrize("way", WAYS)
async def test_a_rollout_is_run_recorded_judged_and_ended(tmp_path: Path, way: Way) -> None:
    isolation(way)
    agent = {"command": [PYTHON, "agent.py", "{q}"], **settings_of(way)}
    async with world(tmp_path, {"agent.py": ASK, **REWARD}, agent=agent, **JUDGED) as here:
        with FakeModelServer([Answer("hello")]) as server:
            here.gateway.register(server.url)
            async with controller(here):
                await here.add(1, {"q": "-say \"é\"\nwith 'quotes'"})
                await here.ended(1)
                detail = await here.client.rollout("r0")
                record = await here.client.calls("r0")
                events = await here.events()
                [part] = [each for each in await here.client.parts() if each.part == "controller"]
        [request] = server.requests
    assert detail.rollout.status.state is RolloutState.SUCCEEDED
    assert request.body["messages"][0]["content"] == "-say \"é\"\nwith 'quotes'"
    assert [call.info.reason for call in record.calls] == [None]
    assert record.reward == 1.0
    assert events["reward"] == {"value": 1.0, "source": "function", "parts": {"said": 6.0}}
    assert events["agent_exit"]["stdout_tail"] == "hello\n"
    assert events["agent_exit"]["cpu_s"] > 0
    assert part.detail["starts"] == ("warm" if way.startswith("warm") else "cold")


async def test_many_rollouts_end_and_none_is_lost_or_run_twice(tmp_path: Path) -> None:
    async with world(tmp_path, {}, agent={"command": "true", "concurrency": 4}) as here, controller(here):
        names = await here.add(30)
        await here.ended(30)
        rollouts = await here.client.rollouts()
        parts = {part.part: part for part in await here.client.parts()}
    assert {rollout.rollout_id for rollout in rollouts} == set(names)
    assert {rollout.status.state for rollout in rollouts} == {RolloutState.SUCCEEDED}
    assert {rollout.status.last_attempt_id for rollout in rollouts} == {"0"}
    assert parts["controller"].detail["limit"] == 4


LEAVE = ASK.split("with urllib")[0].replace("sys.argv[1]}]", "sys.argv[1]}], 'stream': True")
LEAVE += "response = urllib.request.urlopen(request, timeout=60)\nresponse.readline()\nos._exit(0)\n"


async def test_an_agent_that_ends_before_its_stream_leaves_a_cut_call_that_is_not_trained(tmp_path: Path) -> None:
    agent = {"command": [PYTHON, "agent.py", "x"]}
    async with world(tmp_path, {"agent.py": LEAVE, **REWARD}, agent=agent, **JUDGED) as here:
        with FakeModelServer([Answer("a long answer", gated_end=True)]) as server:
            here.gateway.register(server.url)
            async with controller(here):
                await here.add(1)
                await here.ended(1)
            await asyncio.to_thread(server.wait_for, lambda server: server.cancelled == 1)
        detail, record = await here.client.rollout("r0"), await here.client.calls("r0")
    assert detail.rollout.status.state is RolloutState.SUCCEEDED
    [call] = record.calls
    assert (call.info.reason, call.info.trainable, call.info.http_status) == ("cut", False, 499)
    assert record.reward == 1.0


async def test_a_dead_model_server_fails_a_rollout_without_a_reward(tmp_path: Path) -> None:
    settings = {"agent": {"command": [PYTHON, "agent.py", "x"], "attempts": 2}, "gateway": {"hold_limit_s": 0.1}}
    async with world(tmp_path, {"agent.py": ASK, **REWARD}, **settings, **JUDGED) as here, controller(here):
        here.gateway.register("http://127.0.0.1:9/v1")
        await here.add(1)
        await here.ended(1)
        detail, events = await here.client.rollout("r0"), await here.events()
    assert detail.rollout.status.state is RolloutState.FAILED
    assert "could not be served" in str(detail.rollout.status.error_message)
    assert detail.attempts == ["0", "1"]
    assert "reward" not in events


STAY = "import sys, time\nopen('ready', 'w').close()\nif sys.argv[2] == '0': time.sleep(600)\n"
ATTEMPT = "import os, subprocess, sys\nattempt = os.getcwd().split('/')[-2]\n"
ATTEMPT += "subprocess.run([sys.executable, 'stay.py', sys.argv[1], attempt], check=True)\n"


@asynccontextmanager
async def staying(tmp_path: Path, way: Way) -> AsyncIterator[tuple[World, str]]:
    """An agent that stays for ever in its first attempt and ends well in its second, and its mark."""
    isolation(way)
    mark = f"stay-{way.replace(' ', '-')}-{os.getpid()}"
    agent = {"command": [PYTHON, "agent.py", mark], **settings_of(way)}
    async with world(tmp_path, {"agent.py": ATTEMPT, "stay.py": STAY}, agent=agent) as here:
        yield here, mark
    assert processes_with(mark) == []


async def begun(here: World) -> None:
    await here.add(1)
    await until((here.project.state_dir / "rollouts/r0/0/workspace/ready").exists)


async def finishes_anew(here: World) -> None:
    """A controller that starts after another one's end runs what that one left, under a new attempt."""
    async with controller(here):
        await here.ended(1)
        detail = await here.client.rollout("r0")
    assert detail.rollout.status.state is RolloutState.SUCCEEDED
    assert detail.attempts == ["0", "1"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_graceful_stop_ends_agents_and_keeps_their_rollouts(tmp_path: Path, way: Way) -> None:
    async with staying(tmp_path, way) as (here, mark):
        async with controller(here):
            await begun(here)
        assert processes_with(mark) == []
        assert (await here.client.rollout("r0")).rollout.status.state is RolloutState.RUNNING
        await finishes_anew(here)


@pytest.mark.parametrize("way", SANDBOXES)
async def test_isolated_agents_die_with_a_controller_that_is_killed(tmp_path: Path, way: Way) -> None:
    async with staying(tmp_path, way) as (here, mark):
        process = await here.start()
        await begun(here)
        process.kill()
        await process.communicate()
        await until(lambda: processes_with(mark) == [])
        await finishes_anew(here)


@pytest.mark.parametrize("way", ["none", "warm"])
async def test_without_isolation_the_next_controller_ends_what_a_killed_one_left(tmp_path: Path, way: Way) -> None:
    async with staying(tmp_path, way) as (here, mark):
        process = await here.start()
        await begun(here)
        process.kill()
        await process.communicate()
        assert len(processes_with(mark)) == (1 if way == "warm" else 2)  # a fork's command line is its helper's
        await finishes_anew(here)


async def failing(here: World) -> tuple[int | None, str]:
    """Exit code and last line of a controller that ends by itself."""
    process = await here.start()
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    return process.returncode, errors.decode().splitlines()[-1]


@pytest.mark.parametrize(
    ("settings", "code", "problem"),
    [
        (JUDGED, 2, "defines no function `reward`"),
        ({"agent": {"command": "no-such-program"}}, 2, "no program `no-such-program` is on your PATH"),
        ({"agent": {"command": "true 'x"}}, 2, "agent.command cannot be split"),
    ],
)
async def test_what_could_never_work_ends_the_controller_before_it_claims(
    tmp_path: Path, settings: dict[str, Any], code: int, problem: str
) -> None:
    async with world(tmp_path, {"reward.py": ""}, **settings) as here:
        await here.add(1)
        ended, line = await failing(here)
        state = (await here.client.rollout("r0")).rollout.status.state
    assert ended == code
    assert problem in line
    assert state is RolloutState.QUEUING


async def test_agents_never_see_the_admin_key(tmp_path: Path) -> None:
    code = "import json, os\nprint(json.dumps(dict(os.environ)))\n"
    async with world(tmp_path, {"agent.py": code}) as here, controller(here):
        await here.add(1)
        await here.ended(1)
        told = json.loads((here.project.state_dir / "rollouts/r0/0/stdout").read_text())
        events = await here.events()
    assert ADMIN_KEY not in json.dumps(told)
    assert told["AGL_KEY"] not in json.dumps(events)


async def test_time_in_which_a_call_is_held_does_not_count_against_the_time_limit(tmp_path: Path) -> None:
    timeout_s = 4.0
    agent = {"command": [PYTHON, "agent.py", "hi"], "timeout_s": timeout_s}
    async with world(tmp_path, {"agent.py": ASK}, agent=agent) as here:
        with FakeModelServer() as server:
            here.gateway.register(server.url)
            await here.client.pause("The policy's weights are changing.")
            async with controller(here):
                await here.add(1)
                async with asyncio.timeout(60):
                    while here.gateway.gateway.hold.held_total_s < timeout_s + 1:
                        await asyncio.sleep(0.05)
                assert (await here.client.proxy_state()).inflight == 0
                await here.client.resume()
                await here.ended(1)
                state = (await here.client.rollout("r0")).rollout.status.state
                ended = (await here.events())["agent_exit"]
    assert (state, ended["timed_out"]) == (RolloutState.SUCCEEDED, False)
    assert ended["duration_s"] > timeout_s
