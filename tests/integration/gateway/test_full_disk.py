"""The gateway as a process whose store stands on a disk that is really full: a tmpfs of its own mount namespace."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from fakes.model_server import Answer, FakeModelServer

CHAT = "/proxy/rollout/r1/attempt/0/mode/train/openai/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "x" * 20_000}]}
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "--")
LIMIT_S = 60


@contextmanager
def on_a_small_disk(project: Path) -> Iterator[tuple[Path, httpx.Client]]:
    """The state folder as the gateway sees it, and a client with the admin key. Skips where no namespace can be made;
    in CI that fails."""
    state_dir = project / ".agl"
    state_dir.mkdir()
    gateway = shlex.join([sys.executable, "-m", "agl_runtime.gateway", "--root", str(project)])
    mount = f"mount -t tmpfs -o size=3m none {shlex.quote(str(state_dir))}"
    if subprocess.run([*NAMESPACE, "sh", "-c", mount], capture_output=True, check=False).returncode:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no file system can be mounted in a user namespace here")
    process = subprocess.Popen([*NAMESPACE, "sh", "-c", f"{mount} && exec {gateway}"], stderr=subprocess.PIPE)
    seen = Path(f"/proc/{process.pid}/root{state_dir}")
    try:
        give_up_at = time.monotonic() + LIMIT_S
        while not (seen / "run/gateway.json").exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < give_up_at
            time.sleep(0.02)
        headers = {"x-api-key": (seen / "key").read_text()}
        url = json.loads((seen / "run/gateway.json").read_text())["url"]
        with httpx.Client(base_url=url, headers=headers, timeout=LIMIT_S) as http:
            yield seen, http
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as filler:
        while True:
            try:
                filler.write(b"x" * 4096)
            except OSError:
                return


def test_a_full_disk_refuses_calls_with_its_reason_loses_none_and_is_over_when_there_is_space(tmp_path: Path) -> None:
    (tmp_path / "agl.yaml").write_text("agent:\n  command: 'true'\n")
    with FakeModelServer([Answer("ok")]) as model, on_a_small_disk(tmp_path) as (state_dir, http):
        http.post("/api/models", json=[{"model": "policy", "endpoint": model.url}])
        http.post("/api/rollouts", json=[{"input": 1, "rollout_id": "r1"}])
        assert http.post(CHAT, json=BODY).status_code == 200
        fill(state_dir / "filler")
        other = {**BODY, "messages": [{"role": "user", "content": os.urandom(20_000).hex()}]}
        for path, body in ((CHAT, other), ("/api/rollouts", [{"input": os.urandom(20_000).hex()}])):
            refused = http.post(path, json=body)
            assert refused.status_code == 503
            assert "store.sqlite3 is full (database or disk is full)" in refused.text
        assert len(http.get("/api/rollouts/r1/events").json()) == 1, "what was recorded can be read"
        (state_dir / "filler").unlink()
        assert http.post(CHAT, json=other).status_code == 200
        events = http.get("/api/rollouts/r1/events").json()
    assert [event["event_type"] for event in events] == ["model_request"] * 2
