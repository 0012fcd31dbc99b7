"""A project to train in, and a trainer that can be killed at any moment."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_runtime.config import Project, load_project
from agl_runtime.part import Part
from agl_runtime.trainer.modes import Outside, train
from fakes.backend import FakeBackend
from fakes.gateway import FakeGateway

SETTINGS = {
    "reward.function": "reward.py:score",
    "data.train": "train.jsonl",
    "data.val": "val.jsonl",
    "data.shuffle": "false",
    "model.path": "base",
    "train.steps": "3",
    "train.groups_per_step": "2",
    "train.group_size": "2",
}


def make_project(root: Path, settings: Mapping[str, str] | None = None, train: int = 4, val: int = 2) -> Project:
    """`settings` by path; a value of "null" takes one of SETTINGS back."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "base").mkdir(exist_ok=True)
    (root / "base" / "config.json").write_text("{}")
    for name, count in (("train", train), ("val", val)):
        rows = [json.dumps({"id": f"{name}-{n}", "q": n}) for n in range(count)]
        (root / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    (root / "agl.yaml").write_text("agent: {command: agent}\n")
    project = load_project(root, overrides=SETTINGS | dict(settings or {}), environ={})
    project.state_dir.mkdir(exist_ok=True)
    return project


def make_part(project: Project) -> Part:
    return Part(project, argparse.Namespace(), "agl-admin-test")


class Killed(Exception):
    """The trainer was killed here."""


@dataclass
class KillAt:
    """Raises Killed at the n-th of a trainer's dealings with the world (of those called `name`, where it is given), and
    at all that a dead one would still do."""

    moment: int | None = None
    name: str | None = None
    names: list[str] = field(default_factory=list)
    is_dead: bool = False

    def __call__(self, name: str) -> None:
        self.names.append(name)
        count = self.names.count(name) if self.name else len(self.names)
        self.is_dead = self.is_dead or (self.name in (None, name) and count == self.moment)
        if self.is_dead:
            raise Killed(name)


async def run_trainer(
    project: Project, gateway: FakeGateway, kill: KillAt | None = None, stop: asyncio.Event | None = None
) -> FakeBackend:
    """One trainer process from its start to its end."""
    before = kill or KillAt()
    backend = FakeBackend(before=before)
    gateway.before = before

    async def connect(part: Part) -> Any:
        return gateway

    outside = Outside(make_backend=lambda config, policy: backend, connect=connect)
    await train(make_part(project), stop or asyncio.Event(), outside)
    return backend


async def lineage(project: Project, gateway: FakeGateway, moments: Sequence[int]) -> tuple[list[list[str]], int]:
    """The weights that a run killed at these moments ends with, and how often it was really killed."""
    killed = 0
    for moment in moments:
        try:
            await run_trainer(project, gateway, KillAt(moment))
        except Killed:
            killed += 1
    return (await run_trainer(project, gateway)).weights, killed


def places(weights: list[list[str]]) -> list[list[tuple[str, str]]]:
    """Group and index of what was trained: ids without the run and the name of the weights, which differ by run."""
    return [[(name.split("-")[2], name.split("-")[4]) for name in ids] for ids in weights]


def read_lines(project: Project) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project.state_dir / "metrics.jsonl").read_text().splitlines()]


def read_summary(project: Project) -> dict[str, Any]:
    return dict(json.loads((project.state_dir / "summary.json").read_text()))
