"""The gateway as a process: how it starts, refuses to start, stops, and comes back after being killed."""

from __future__ import annotations

import json
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.model_server import Answer, FakeModelServer

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
CHAT = "/proxy/rollout/r1/attempt/0/mode/train/openai/v1/chat/completions"
LIMIT_S = 40


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "agl.yaml").write_text("agent:\n  command: 'true'\n")
    return tmp_path


def start(project: Path, *settings: str) -> subprocess.Popen[str]:
    sets = [word for setting in settings for word in ("--set", setting)]
    argv = [sys.executable, "-m", "agl_runtime.gateway", "--root", str(project), *sets]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


@contextmanager
def running(project: Path, *settings: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A started gateway that answers, and a client of it with the admin key."""
    file = project / ".agl/run/gateway.json"
    process = start(project, *settings)
    try:
        give_up_at = time.monotonic() + LIMIT_S
        while not file.exists() or json.loads(file.read_text())["pid"] != process.pid:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < give_up_at
            time.sleep(0.02)
        key = (project / ".agl/key").read_text()
        with httpx.Client(
            base_url=json.loads(file.read_text())["url"], headers={"x-api-key": key}, timeout=LIMIT_S
        ) as http:
            assert http.get("/healthz").status_code == 200
            yield process, http
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=LIMIT_S)


def refused(project: Path, *settings: str) -> tuple[int, str]:
    process = start(project, *settings)
    return process.wait(LIMIT_S), process.communicate()[1]


def enqueue(http: httpx.Client, model: FakeModelServer) -> None:
    http.post("/api/models", json=[{"model": "policy", "endpoint": model.url}])
    http.post("/api/rollouts", json=[{"input": 1, "rollout_id": "r1"}])


def counts(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/api/counts").json()
    return found


def test_a_taken_port_is_a_missing_precondition(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, log = refused(project, f"gateway.port={port}")
    assert code == 3
    assert f"The gateway cannot listen on port {port} of 127.0.0.1: Address already in use." in log
    assert "Set gateway.port to a free port, or to 0 for any." in log
    assert "Traceback" not in log


def test_an_address_of_another_machine_is_a_wrong_configuration(project: Path) -> None:
    code, log = refused(project, "gateway.host=192.0.2.1")
    assert code == 2
    assert "The gateway cannot listen on 192.0.2.1" in log


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_without_a_key_it_serves_nobody(project: Path, host: str) -> None:
    (project / ".agl").mkdir()
    (project / ".agl/key").touch()
    code, log = refused(project, f"gateway.host={host}")
    assert code == 2
    assert "The gateway has no admin key." in log


def test_a_second_gateway_of_the_project_is_refused(project: Path) -> None:
    with running(project):
        code, log = refused(project)
        assert code == 1
        assert "Traceback" not in log


def test_the_key_is_made_once_for_its_owner_only_and_sigterm_stops_in_order(project: Path) -> None:
    with running(project) as (process, http):
        assert http.get("/api/counts").status_code == 200
        file = project / ".agl/key"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        assert file.read_text() not in log
        assert not (project / ".agl/run/gateway.json").exists()
    with running(project) as (_, http):
        assert http.get("/api/counts").status_code == 200


def test_stopping_does_not_wait_for_those_who_wait(project: Path) -> None:
    with running(project, "gateway.hold_limit_s=600") as (process, http), ThreadPoolExecutor() as others:
        http.post("/api/rollouts", json=[{"input": 1, "rollout_id": "r1"}])
        held = others.submit(http.post, CHAT, json=BODY)
        waiting = others.submit(http.get, "/api/rollouts/terminal?wait=60")
        give_up_at = time.monotonic() + LIMIT_S
        while http.get("/proxy/state").json()["held"] == 0:
            assert time.monotonic() < give_up_at
        with http.stream("GET", "/api/changes") as changes:
            next(changes.iter_lines())
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0
        assert (held.result().status_code, held.result().headers["retry-after"]) == (429, "5")
        assert waiting.result().json()["items"] == []


def test_a_killed_gateway_comes_back_at_its_port_with_everything_committed(project: Path) -> None:
    with FakeModelServer([Answer("one"), Answer("two", gated=True)]) as model, ThreadPoolExecutor() as others:
        with running(project) as (process, http):
            enqueue(http, model)
            assert http.post(CHAT, json=BODY).status_code == 200
            url = http.base_url
            lost = others.submit(http.post, CHAT, json={**BODY, "seed": 1})
            model.wait_for(lambda server: len(server.requests) == 2)
            process.kill()
            with pytest.raises(httpx.HTTPError):
                lost.result()
        with running(project) as (_, http):
            assert http.base_url == url
            found = counts(http)
            assert (found["calls.trainable"], found["calls.incomplete"]) == (1, 1)
            (event,) = http.get("/api/rollouts/r1/events").json()
            assert event["data"]["response"]["choices"][0]["message"]["content"] == "one"
            enqueue(http, model)
            model.release()
            again = http.post(CHAT, json={**BODY, "seed": 1}, headers={"x-stainless-retry-count": "1"})
            assert again.json()["choices"][0]["message"]["content"] == "two"
