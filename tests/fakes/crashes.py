"""A training run under kill -9: its project, who watches it from outside, the kills, and what its store must prove.

The run is `agl up` in a process of its own, with a tiny policy and agents of the standard library alone. An agent tells
the observer of every answer that it saw before it goes on, over a connection that no kill of agl's parts cuts, and the
observer reads in the store what is committed while the run goes on. `crash_evidence` compares both with the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from agl_cli.runstate import ProcessId, Record, left_record
from agl_runtime.part import SUMMARY_FILE
from fakes.agents import processes_with
from fakes.crash_evidence import Evidence

PARTS = ("gateway", "controller", "trainer")
EVERYTHING = (*PARTS, "supervisor", "agents")
TARGETS: tuple[tuple[str, ...], ...] = (
    *((name,) for name in EVERYTHING),
    ("gateway", "controller"),
    ("gateway", "trainer"),
    ("controller", "trainer"),
    EVERYTHING,
)
RECOVERY_S = 120.0
GROUP_SIZE, BATCH, ACTIVE = 2, 2, 4

AGENT = r'''
import hashlib, http.client, json, os, socket, sys, time
from urllib.parse import urlsplit

url = urlsplit(os.environ["OPENAI_BASE_URL"])
attempt = url.path.split("/attempt/")[1].split("/")[0]
host, port = os.environ["OBSERVER"].split(":")
observer = socket.create_connection((host, int(port))).makefile("rw")


def tell(answer_id, text, whole):
    note = {"rollout": os.environ["AGL_ROLLOUT_ID"], "attempt": attempt, "id": answer_id, "whole": whole}
    note["digest"] = hashlib.sha256(text.encode()).hexdigest()
    observer.write(json.dumps(note) + "\n")
    observer.flush()
    observer.readline()


def events(response):
    answer_id, text = None, ""
    try:
        for line in response:
            if line.startswith(b"data: [DONE]"):
                return answer_id, text, True
            if line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    break
                answer_id = chunk["id"]
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    except (OSError, http.client.HTTPException):
        pass
    return answer_id, text, False


def ask(body):
    """The answer's text; as SDKs do, what broke off before its head is asked again with a mark."""
    for count in range(6):
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
        headers |= {"x-stainless-retry-count": str(count)}
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=300)
        try:
            connection.request("POST", url.path + "/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status == 200 and body["stream"]:
                answer_id, text, whole = events(response)
                if answer_id is not None:
                    tell(answer_id, text, whole)
                if not whole:
                    sys.exit("the stream broke off")
                return text
            data = response.read()
            if response.status == 200:
                answer = json.loads(data)
                text = answer["choices"][0]["message"]["content"] or ""
                tell(answer["id"], text, True)
                return text
            if response.status not in (429, 500, 502, 503):
                sys.exit(f"refused with {response.status}")
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.3 * (count + 1))
    sys.exit("no answer")


messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(3):
    text = ask({"model": "policy", "messages": messages, "stream": turn % 2 == 1})
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "On."}]
'''
REWARD = "import random\n\n\ndef reward(task):\n    return random.random()\n"


def make_project(root: Path, policy: Path, observer: str, isolation: str = "auto") -> str:
    """Write the project; returns the mark of its agents' processes."""
    root.mkdir(parents=True)
    mark = f"crash-{hashlib.sha256(str(root).encode()).hexdigest()[:12]}"
    settings: dict[str, Any] = {
        "agent": {
            "command": [sys.executable, "-I", "agent.py", "{question}", mark],
            "env": {"OBSERVER": observer},
            "isolation": isolation,
            "concurrency": 4,
            "timeout_s": 60,
        },
        "reward": {"function": "reward.py:reward", "python": sys.executable},
        "data": {"train": "tasks.jsonl"},
        "model": {"path": str(policy), "max_tokens": 32},
        "train": {
            "steps": 100_000,
            "groups_per_step": BATCH,
            "active_groups": ACTIVE,
            "group_size": GROUP_SIZE,
            "lr": 1e-4,
            "no_signal_steps": 1000,
        },
    }
    tasks = "".join(json.dumps({"id": f"t{n}", "question": f"What is {n} + 1?"}) + "\n" for n in range(8))
    files = {"agl.yaml": json.dumps(settings), "agent.py": AGENT, "reward.py": REWARD, "tasks.jsonl": tasks}
    for name, text in files.items():
        (root / name).write_text(text, encoding="utf-8")
    return mark


class Listener(socketserver.ThreadingTCPServer):
    """Takes down what agents saw, and lets each go on only then."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Notes)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Listener:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Notes(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the agent was killed
            for line in self.rfile:
                assert isinstance(self.server, Listener)
                self.server.notes.append(json.loads(line))
                self.wfile.write(b"\n")


@dataclass
class CrashRun:
    """`agl up` in `root`, started again whenever it has ended; `starts` counts that, `recovery_s` how long the run took
    after each kill to commit its next call."""

    root: Path
    mark: str
    evidence: Evidence
    rng: random.Random
    starts: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    recovery_s: list[float] = field(default_factory=list)
    _up: subprocess.Popen[bytes] | None = None

    @property
    def state_dir(self) -> Path:
        return self.root / ".agl"

    def keep_up(self, *settings: str) -> subprocess.Popen[bytes]:
        """The same command again, if the last one has ended."""
        if self._up is None or self._up.poll() is not None:
            words = [sys.executable, "-m", "agl_cli.main", "up", "--json", "--project", str(self.root)]
            words += [word for item in settings for word in ("--set", item)]
            with (self.root / "up.err").open("ab") as errors:
                self._up = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
            self.starts += 1
        return self._up

    def until_moving(self) -> None:
        """Until a call is committed that was not before. Raises TimeoutError when the run does not come back."""
        self.evidence.look(self.state_dir)
        before, began = len(self.evidence.committed), time.monotonic()
        while len(self.evidence.committed) == before:
            if time.monotonic() - began > RECOVERY_S:
                raise TimeoutError(f"the run did not come back within {RECOVERY_S:.0f} s; see {self.state_dir}/logs")
            self.keep_up()
            time.sleep(0.05)
            self.evidence.look(self.state_dir)
        self.recovery_s.append(time.monotonic() - began)

    def kill(self, targets: Sequence[str]) -> None:
        """kill -9 of parts and whatever else, at once."""
        self.evidence.look(self.state_dir)
        record = left_record(self.state_dir)
        doomed = [process for name in targets for process in self._processes(name, record)]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.kills["everything" if targets == EVERYTHING else "+".join(targets)] += 1

    def _processes(self, name: str, record: Record | None) -> list[psutil.Process]:
        if name == "agents":
            found = processes_with(self.mark)
            return self.rng.sample(found, k=min(len(found), self.rng.randint(1, 4)))
        if record is None:
            return []
        known: ProcessId | None = record.holder if name == "supervisor" else record.parts.get(name)
        process = known.process() if known else None
        return [process] if process else []

    def crash(self, targets: Sequence[str], longest_s: float, early: float = 0.3) -> None:
        """Kill at a random moment: soon after the kill before (a share `early` of them), else once the run goes on."""
        self.keep_up()
        if self.rng.random() >= early:
            self.until_moving()
        time.sleep(self.rng.uniform(0.0, longest_s))
        self.kill(targets)

    def finish(self) -> dict[str, Any]:
        """Bring the run to its end in order: a graceful stop, then the few steps that end what is under way."""
        while not (self.state_dir / SUMMARY_FILE).exists():  # a trainer that still loads its policy writes none
            self.until_moving()
            process = self.keep_up()
            self._until_started(process)  # what an earlier one left behind may have been what moved
            process.send_signal(signal.SIGTERM)
            if process.wait(RECOVERY_S) != 130:
                raise RuntimeError(f"a run that was stopped ended with exit code {process.returncode}")
        done = json.loads((self.state_dir / SUMMARY_FILE).read_text())["steps"]
        process = self.keep_up(f"train.steps={done + ACTIVE // BATCH + 1}")
        if process.wait(RECOVERY_S) != 0:
            raise RuntimeError(f"the last run ended with exit code {process.returncode}; see {self.root}/up.err")
        return dict(json.loads((self.state_dir / SUMMARY_FILE).read_text()))

    def _until_started(self, process: subprocess.Popen[bytes]) -> None:
        """Until it has noted a part, which comes after it hears signals; or it has ended."""
        give_up_at = time.monotonic() + RECOVERY_S
        while process.poll() is None and time.monotonic() < give_up_at:
            record = left_record(self.state_dir)
            if record is not None and record.holder.pid == process.pid and record.parts:
                return
            time.sleep(0.05)

    def end(self) -> None:
        """Leave no process behind, whatever went wrong."""
        self.kill(EVERYTHING)
        if self._up is not None:
            self._up.wait()
        for process in processes_with(str(self.root)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def crash_run(root: Path, policy: Path, seed: int, isolation: str = "auto") -> Iterator[CrashRun]:
    with Listener() as listener:
        mark = make_project(root, policy, listener.address, isolation)
        run = CrashRun(root, mark, Evidence(listener.notes), random.Random(seed))
        try:
            yield run
        finally:
            run.end()
