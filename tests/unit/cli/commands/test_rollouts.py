from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agl_cli.commands import rollouts
from agl_cli.main import app
from agl_runtime.calls import RolloutCalls, ids_array
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
from fakes.tiny_model import make_tiny_tokenizer
from fakes.trained import make_call, make_calls


class FakeGateway:
    """Knows a training and a validation rollout that each answered with their own id and went well."""

    async def rollouts(self, states: Sequence[RolloutState], limit: int) -> list[Rollout]:
        return [_rollout(name) for name in ("train", "val")]

    async def rollout(self, rollout_id: str) -> RolloutDetail:
        return RolloutDetail(rollout=_rollout(rollout_id), attempts=["0"])

    async def events(self, rollout_id: str) -> list[Event]:
        response: dict[str, Any] = {"choices": [{"message": {"role": "assistant", "content": rollout_id}}]}
        if rollout_id == "failed":
            response = {"error": {"message": "The model server said no.\nAnd more."}}
        request = {"messages": [{"role": "user", "content": "Who?"}]}
        data = {"dialect": "chat", "request": request, "response": response}
        about: dict[str, Any] = {"rollout_id": rollout_id, "attempt_id": "0", "timestamp": 0.0}
        return [Event(event_type="model_request", data={**data, "call_id": name}, **about) for name in ("c0", "c1")]

    async def calls(self, rollout_id: str) -> RolloutCalls:
        """The second call of the rollout `split` goes on from the first, but not by its ids."""
        first = make_call(rollout_id)
        later = replace(make_call(rollout_id, "c1"), prompt_ids=ids_array([1, 2, 9]))
        return make_calls(rollout_id, 1.0, first, *([later] if rollout_id == "split" else []))


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


def test_the_lines_written_are_counted_and_a_reward_that_left_none_is_named(root: Path) -> None:
    words = ["rollouts", "export", "--format", "sft", "--project", str(root)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).stderr == "1 line.\n"
    none = CliRunner().invoke(app, [*words, "--min-reward", "2"], catch_exceptions=False)
    assert none.stderr == "0 lines.\n  Only rollouts with a reward of at least 2 count; see --min-reward.\n"


def test_list_is_another_name_of_ls(root: Path) -> None:
    result = CliRunner().invoke(app, ["rollouts", "list", "--step", "9", "--project", str(root)])
    assert (result.exit_code, result.stderr) == (0, "No such rollout is recorded.\n")


def test_whole_rollouts_are_exported_of_either_mode(root: Path) -> None:
    assert [row["rollout"]["rollout_id"] for row in export(root)] == ["train", "val"]


def test_a_rollout_that_split_is_shown_with_the_reason_and_the_remedy(root: Path) -> None:
    (root / "model" / "tokenizer.json").unlink()
    words = ["rollouts", "show", "split", "--project", str(root)]
    shown = CliRunner().invoke(app, words, catch_exceptions=False).stdout.splitlines()
    assert "sample 2: 6 tokens, 3 trained, of 1 call; it broke off an earlier one: undiagnosed" in shown
    (split,) = [line for line in shown if line.startswith("splits: ")]
    assert split.startswith("splits: 1 because of undiagnosed. Set model.path to a folder that holds the policy's")
    assert "harness agent.py over chat, template of model" in shown
    found = json.loads(CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False).stdout)
    assert (found["continuity"]["harness"], list(found["continuity"]["remedies"])) == ("agent.py", ["undiagnosed"])


def test_where_a_conversation_broke_the_differing_words_are_shown(root: Path) -> None:
    make_tiny_tokenizer().save_pretrained(root / "model")
    words = ["rollouts", "show", "split", "--project", str(root)]
    (sample,) = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["samples"][1:]
    broke = sample["broke"]
    assert (broke["cause"], broke["call"], broke["earlier"]) == ("template", "c1", "c0")
    assert broke["before"]
    assert broke["was"] != broke["now"]
    shown = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    before, was, now = (json.dumps(broke[name], ensure_ascii=False) for name in ("before", "was", "now"))
    assert f"  behind {before} c0 went on with {was}, c1 with {now}\n" in shown


def test_another_conversation_is_not_said_to_have_broken_off(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_tokenizer().save_pretrained(root / "model")
    later = replace(make_call("split", "c1"), prompt_ids=ids_array([9, 8]))

    async def calls(_: FakeGateway, rollout_id: str) -> RolloutCalls:
        return make_calls(rollout_id, 1.0, make_call(rollout_id), later)

    monkeypatch.setattr(FakeGateway, "calls", calls)
    words = ["rollouts", "show", "split", "--project", str(root)]
    shown = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert "sample 2: 5 tokens, 3 trained, of 1 call; a conversation of its own\n" in shown
    assert "behind" not in shown


def test_a_failed_call_is_shown_with_its_error(root: Path) -> None:
    words = ["rollouts", "show", "failed", "--project", str(root)]
    assert "c0: The model server said no.\n" in CliRunner().invoke(app, words, catch_exceptions=False).stdout


def test_a_rollout_in_one_piece_needs_no_remedy(root: Path) -> None:
    shown = CliRunner().invoke(app, ["rollouts", "show", "val", "--project", str(root)], catch_exceptions=False).stdout
    assert "sample 1: 5 tokens, 3 trained, of 1 call" in shown
    assert "split" not in shown
