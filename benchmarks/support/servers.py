"""The processes that are measured, each started by a benchmark and ended by its own id.

    with model_stub(shape) as stub, agl_gateway(folder) as server:
        server.register(stub)
        paths = server.add_rollouts(16)

agl comes from the working tree. Agent Lightning 1.0.2 comes from the package index into a Python 3.12 environment of
its own, which is made once and kept (`tests/fakes/environments.py`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from agl_runtime.errors import PreconditionError
from agl_runtime.gateway.auth import agent_key
from agl_runtime.part import STORE_FILE, admin_key, gateway_url
from support.conversation import MODEL, Shape

HERE = Path(__file__).resolve().parent.parent
REFERENCE = "agentlightning==1.0.2"
KEY = "benchmark-key"
START_S = 60.0
GRACE_S = 60.0


@contextmanager
def process(command: Sequence[str | Path], folder: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child with its standard input open and its output in a log of `folder`."""
    log = folder / f"{Path(command[0]).name}-{time.monotonic_ns()}.log"
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=out, stderr=out, env={**os.environ, **env}
        )
        try:
            yield child
        finally:
            end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    """Ask it to stop, and kill it when it does not."""
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def send(method: str, url: str, key: str, body: Any = None) -> Any:
    """A request's answer as JSON, or None for an empty one."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=120) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def size(url: str, key: str) -> int:
    """Bytes of what a GET answers."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return len(answer.read())


@dataclass(frozen=True, slots=True)
class Server:
    """A gateway that runs. `scoped`: agents get keys of their own."""

    name: str
    url: str
    key: str
    pid: int
    scoped: bool

    def register(self, endpoint: str) -> None:
        send("POST", f"{self.url}/api/models", self.key, [{"model": MODEL, "endpoint": endpoint}])

    def clear_models(self) -> None:
        send("DELETE", f"{self.url}/api/models", self.key)

    def add_rollouts(self, count: int, **fields: Any) -> list[str]:
        created = send("POST", f"{self.url}/api/rollouts", self.key, [{"input": {}, **fields}] * count)
        return [rollout["rollout_id"] for rollout in created]

    def agent(self, rollout_id: str, operation: str = "openai/v1/chat/completions") -> tuple[str, str]:
        """The path of its model calls, and its key."""
        path = f"/proxy/rollout/{rollout_id}/attempt/0/mode/train/{operation}"
        return path, agent_key(self.key, rollout_id, "0", "train") if self.scoped else self.key

    def finish(self, rollout_id: str, reward: float) -> None:
        base = f"{self.url}/api/rollouts/{rollout_id}"
        send("PATCH", base, self.key, {"status": {"state": "running", "last_attempt_id": "0"}})
        reward_event = {"event_type": "reward", "data": {"value": reward, "source": "function"}}
        send("POST", f"{base}/attempt/0/events", self.key, reward_event)
        send("PATCH", base, self.key, {"status": {"state": "succeeded"}})

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def memory_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_full_info().uss)


@contextmanager
def agl_gateway(folder: Path, settings: dict[str, Any] | None = None) -> Iterator[Server]:
    """agl's gateway with its durable store in `folder`/.agl, as `agl up` starts it."""
    config = {"agent": {"command": "unused"}, "model": {"name": MODEL}, **(settings or {})}
    (folder / "agl.yaml").write_text(json.dumps(config), encoding="utf-8")
    state, command = folder / ".agl", [sys.executable, "-m", "agl_runtime.gateway", "--root", str(folder)]
    with process(command, folder) as child:
        url = wait_for(lambda: gateway_url(state), child, folder)
        wait_for(lambda: send("GET", f"{url}/healthz", ""), child, folder)
        yield Server("agl", url, admin_key(state), child.pid, scoped=True)


def store_bytes(folder: Path) -> int:
    """Size of the store of a gateway that was stopped."""
    return sum(file.stat().st_size for file in (folder / ".agl").glob(f"{STORE_FILE}*"))


@contextmanager
def reference_server(folder: Path) -> Iterator[Server]:
    """Agent Lightning's server as it ships, on loopback."""
    port = free_port()
    options = [f"port={port}", "host=127.0.0.1", f"key={KEY}", f"default_proxy.model_name={MODEL}"]
    with process([reference_python(), "-m", "agentlightning.server", *options], folder) as child:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: send("GET", f"{url}/healthz", ""), child, folder)
        yield Server("agentlightning 1.0.2", url, KEY, child.pid, scoped=False)


@contextmanager
def model_stub(shape: Shape, delay_s: float = 0.0) -> Iterator[str]:
    """The endpoint of a bare model server."""
    numbers = [str(each) for each in (shape.turns, shape.first, shape.sampled, shape.observed, delay_s)]
    child = subprocess.Popen(
        [sys.executable, "-m", "support.model_stub", *numbers],
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        if child.stdout is None:
            raise RuntimeError("the stub has no output")
        yield f"http://127.0.0.1:{int(child.stdout.readline())}/v1"
    finally:
        end(child)


def reference_python(*more: str) -> Path:
    """The interpreter of an environment with Agent Lightning 1.0.2 and `more` packages."""
    sys.path.append(str(HERE.parent / "tests"))
    import pytest

    from fakes.environments import environment, interpreter

    try:
        return environment(interpreter("3.12"), [REFERENCE, *more]) / "python"
    except (pytest.skip.Exception, pytest.fail.Exception) as error:
        raise SystemExit(f"Agent Lightning cannot be measured here: {error}") from error


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(ask: Any, child: subprocess.Popen[bytes], folder: Path) -> Any:
    """What `ask` returns as soon as it does not fail. Raises SystemExit with the log when the child has ended."""
    give_up_at = time.monotonic() + START_S
    while True:
        try:
            return ask()
        except (OSError, urllib.error.URLError, PreconditionError):
            if child.poll() is not None or time.monotonic() > give_up_at:
                logs = [log.read_text(errors="replace")[-2000:] for log in sorted(folder.glob("*.log"))]
                raise SystemExit("A process did not start:\n" + "\n".join(logs)) from None
            time.sleep(0.05)
