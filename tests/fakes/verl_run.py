"""The example, trained by `agl up` with the verl backend on the CPU, in verl's environment."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from agl_runtime.trainer.backends.verl.setup import Lines
from fakes.verl import verl_python

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "calculator"
PATIENCE_S = 900.0
UPDATES, KILLED_AFTER = 10, 4
"""Of the run that several modules of tests look at."""


class VerlRun:
    """A copy of the example in `root`. `train` is merged into its section of agl.yaml; so many tasks are validated.
    `reward` is the reward function, the example's own if not said. `env` is the environment of its commands; `killed`
    the command line and the environment of each process that `up_until` killed."""

    def __init__(self, root: Path, train: Mapping[str, Any], validated: int = 64, reward: str | None = None) -> None:
        self.root = root
        self._said: list[Path] = []
        self.killed: list[tuple[str, dict[str, str]]] = []
        self._python = verl_python()
        metadata = (
            root.with_name(f"{root.name}-installed") / "agl-0.dist-info" / "METADATA"
        )  # agl asks for its own version
        metadata.parent.mkdir(parents=True)
        metadata.write_text("Metadata-Version: 2.1\nName: agl\nVersion: 0\n")
        path = os.pathsep.join(map(str, (ROOT / "runtime", ROOT, ROOT / "tests", metadata.parents[1])))
        self.env = {**os.environ, "PYTHONPATH": path}
        shutil.copytree(EXAMPLE, root, ignore=shutil.ignore_patterns(".agl", "__pycache__"))
        file = root / "agl.yaml"
        settings = yaml.safe_load(file.read_text())
        settings["agent"]["command"] = f"{sys.executable} agent.py {{question}}"  # agents have their own Python
        settings["train"] |= {"backend": "verl", "device": "cpu", **train}
        settings["eval"] = {"limit": validated}
        settings["reward"]["function"] = reward or settings["reward"]["function"]
        file.write_text(yaml.safe_dump(settings))

    def up(self) -> int:
        """To the end; its exit code."""
        return self.agl("up")

    def up_until(self, step: int) -> None:
        """Kill all that `agl up` started, at once, as soon as the metrics have that step."""
        child = self._up_while(lambda: len(self.steps()) < step)
        supervisor = psutil.Process(child.pid)
        processes = [supervisor, *supervisor.children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.Error):  # an agent may just have ended, or be none that can be read
                self.killed.append((" ".join(process.cmdline()), process.environ()))
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends with the one before
                process.kill()
        child.wait()

    def up_until_told(self, **event: Any) -> None:
        """Interrupt `agl up` as soon as agl's pieces in verl tell of an event like this."""
        child = self._up_while(lambda: not any(event.items() <= told.items() for told in self._told()))
        child.send_signal(signal.SIGINT)
        child.wait(timeout=PATIENCE_S)

    def agl(self, *arguments: str) -> int:
        child = self._start(*arguments)
        try:
            return child.wait(timeout=PATIENCE_S)
        finally:
            child.kill()

    @property
    def said(self) -> str:
        """By the last command."""
        return self._said[-1].read_text(errors="replace")

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.root / ".agl" / "summary.json").read_text())

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of each step, whole lines only."""
        file = self.root / ".agl" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in map(json.loads, lines) if line["kind"] == "step"]

    def log(self) -> str:
        file = self.root / ".agl" / "logs" / "trainer.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def trained(self) -> list[str]:
        """The rollouts of every checkpoint that the store was told of, in the order of the run."""
        with contextlib.closing(sqlite3.connect(self.root / ".agl" / "store.sqlite3")) as store:
            records = [json.loads(record) for (record,) in store.execute("SELECT record FROM checkpoints ORDER BY n")]
        return [name for record in records for name in record["rollout_ids"]]

    def _told(self) -> list[Mapping[str, Any]]:
        files = (self.root / ".agl" / "verl").glob("*/events.jsonl")
        return [line for file in files for line in Lines(file).fresh()]

    def _up_while(self, goes_on: Callable[[], bool]) -> subprocess.Popen[bytes]:
        child = self._start("up")
        give_up_at = time.monotonic() + PATIENCE_S
        while goes_on():
            if child.poll() is not None or time.monotonic() > give_up_at:
                child.kill()
                raise AssertionError(f"ended too early: {self.said}\n{self.log()[-3000:]}")
            time.sleep(0.1)
        return child

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        self._said.append(self.root.with_name(f"{self.root.name}-said-{len(self._said)}"))
        with self._said[-1].open("wb") as said:
            return subprocess.Popen(
                [self._python, "-m", "agl_cli.main", *arguments, "--project", str(self.root)],
                cwd=self.root,
                env=self.env,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
