"""Agent Lightning 1.0.2 as an independent client: its controller runs an agent class of its style, both unmodified,
against this gateway."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agl_runtime import part
from agl_runtime.client import GatewayClient
from agl_runtime.errors import PreconditionError
from agl_runtime.schemas import LocalConfig, Model, RolloutConfig, RolloutCreate, RolloutState
from fakes.environments import environment, interpreter
from fakes.model_server import Answer, FakeModelServer

REQUIREMENTS = ["agentlightning==1.0.2"]
AGENT = """
import json, os, urllib.request


def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["AGL_KEY"]}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=30) as answer:
        return json.load(answer)


class Agent:
    def run(self):
        messages = [{"role": "user", "content": os.environ["QUESTION"]}]
        answer = post(os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions", {"model": "any", "messages": messages})
        text = answer["choices"][0]["message"]["content"]
        reward = {"value": float(len(text)), "source": "agent"}
        post(os.environ["AGL_EVENT_URL"], {"event_type": "reward", "data": reward})
"""

READ_BACK = """
import json, sys
from agentlightning.client import AgentLightningSyncClient
from agentlightning.schemas import Event

url, key, *ids = sys.argv[1:]
with AgentLightningSyncClient(key=key, base_url=url) as client:
    for rollout_id in ids:
        events = client.get(f"/api/rollouts/{rollout_id}/events", params={"format": "triplet"}).json()
        print(json.dumps([Event.model_validate(event).model_dump() for event in events]))
"""


@contextmanager
def process(command: list[str], log: Path, **env: str) -> Iterator[None]:
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **env}, cwd=log.parent)
        try:
            yield
        finally:
            child.terminate()
            child.wait(timeout=30)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "agl.yaml").write_text("agent:\n  command: unused\n", encoding="utf-8")
    (tmp_path / "v1_agent.py").write_text(AGENT, encoding="utf-8")
    return tmp_path


async def announced(state_dir: Path) -> str:
    for _ in range(300):
        try:
            return part.gateway_url(state_dir)
        except PreconditionError:
            await asyncio.sleep(0.1)
    raise TimeoutError("the gateway did not announce itself")


async def test_its_controller_runs_its_agents_against_this_gateway(project: Path) -> None:
    python = environment(interpreter("3.12"), REQUIREMENTS) / "python"
    key = part.admin_key(project / ".agl")
    gateway = [sys.executable, "-m", "agl_runtime.gateway", "--root", str(project)]
    with FakeModelServer(lambda _: Answer("four")) as server, process(gateway, project / "gateway.log"):
        url = await announced(project / ".agl")
        controller = [
            *[str(python), "-m", "agentlightning.controller", "runner_type=local", "local_runner.poll_interval=0.3"],
            *[f"agl_server.url={url}", f"agl_server.key={key}"],
        ]
        async with GatewayClient(url, key) as client:
            await client.register_model(Model(model="policy", endpoint=server.url, version=3))
            local = LocalConfig(agent_class="v1_agent:Agent", env_map={"QUESTION": "input.question"})
            create = RolloutCreate(input={"question": "2+2?"}, config=RolloutConfig(timeout_seconds=60, local=local))
            ids = {rollout.rollout_id for rollout in await client.add_rollouts([create] * 3)}
            with process(controller, project / "controller.log", PYTHONPATH=str(project)):
                cursor, ended = 0, {}
                while len(ended) < len(ids):
                    page = await client.terminal(cursor, wait_s=30)
                    assert page.items, (project / "controller.log").read_text(encoding="utf-8")
                    ended |= {item.rollout_id: item.state for item in page.items}
                    cursor = page.next_after
            assert ended == dict.fromkeys(ids, RolloutState.SUCCEEDED)
            lines = subprocess.check_output([python, "-c", READ_BACK, url, key, *ids], text=True).splitlines()
            assert len(lines) == len(ids)
            for request, reward in map(json.loads, lines):
                data = request["data"]
                assert request["event_type"] == "model_request"
                assert data["prompt_token_ids"]
                assert len(data["response_token_ids"]) == len(data["response_log_probs"]) > 0
                assert data["server"] == {"model": "policy", "version": 3}
                assert (data["http_status"], data["status"]) == (200, "ok")
                assert (reward["event_type"], reward["data"]) == ("reward", {"value": 4.0, "source": "agent"})
