from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agl_cli.commands import rollouts
from agl_cli.main import app
from agl_runtime.calls import RolloutCalls
from agl_runtime.schemas import (
    Event,
    Rollout,
    RolloutConfig,
    RolloutDetail,
    RolloutMetadata,
    RolloutState,
    RolloutStatus,
)
from fakes.projects import make_project
from fakes.trained import make_call, make_calls


class FakeGateway:
    """Knows a training and a validation rollout that each answered with their own id and went well."""

    async def rollouts(self, states: Sequence[RolloutState], limit: int) -> list[Rollout]:
        return [_rollout(name) for name in ("train", "val")]

    async def rollout(self, rollout_id: str) -> RolloutDetail:
        return RolloutDetail(rollout=_rollout(rollout_id), attempts=["0"])

    async def events(self, rollout_id: str) -> list[Event]:
        response = {"choices": [{"message": {"role": "assistant", "content": rollout_id}}]}
        request = {"messages": [{"role": "user", "content": "Who?"}]}
        data = {"call_id": "c0", "dialect": "chat", "request": request, "response": response}
        return [Event(event_type="model_request", rollout_id=rollout_id, attempt_id="0", timestamp=0.0, data=data)]

    async def calls(self, rollout_id: str) -> RolloutCalls:
        return make_calls(rollout_id, 1.0, make_call(rollout_id))


def _rollout(name: str) -> Rollout:
    status = RolloutStatus(state=RolloutState.SUCCEEDED, created_at=0.0, updated_at=0.0)
    kept: dict[str, Any] = {"config": RolloutConfig(), "metadata": RolloutMetadata(), "status": status}
    return Rollout(rollout_id=name, input={}, is_train=name == "train", **kept)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    @asynccontextmanager
    async def gateway(_: object) -> AsyncIterator[FakeGateway]:
        yield FakeGateway()

    monkeypatch.setattr(rollouts, "_gateway", gateway)
    return make_project(tmp_path / "project")


def export(root: Path, *arguments: str) -> list[dict[str, Any]]:
    words = ["rollouts", "export", "--project", str(root), *arguments]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize(
    ("mode", "exported"), [((), ["train"]), (("--mode", "train"), ["train"]), (("--mode", "val"), ["val"])]
)
def test_supervised_data_leaves_held_out_tasks_out_unless_they_are_asked_for(
    root: Path, mode: tuple[str, ...], exported: list[str]
) -> None:
    rows = export(root, "--format", "sft", *mode)
    assert [row["messages"][-1]["content"] for row in rows] == exported


def test_whole_rollouts_are_exported_of_either_mode(root: Path) -> None:
    assert [row["rollout"]["rollout_id"] for row in export(root)] == ["train", "val"]
