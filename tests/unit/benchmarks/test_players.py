"""Rollouts played in one process are those of the example's agent, recorded whole, and the same each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from agl_runtime.calls import RolloutCalls
from agl_runtime.samples.build import build_samples
from agl_runtime.samples.types import Limits
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.engine import Engine
from agl_runtime.trainer.backends.embedded.policy import load_policy

ROLLOUTS = 12


@pytest.fixture(scope="module")
def play(bench: Callable[[str], ModuleType]) -> Iterator[Callable[[], list[RolloutCalls]]]:
    torch.set_num_threads(1)
    players: Any = bench("support.players")
    policy = load_policy(players.EXAMPLE / "policy")
    engine = Engine(policy, PolicyVersion(1, 0))
    engine.start()
    table = players.Players(engine, Codec(policy.tokenizer, policy.stop_ids))
    tasks = players.tasks("val")[:ROLLOUTS]
    yield lambda: table.play(tasks, [task["id"] for task in tasks])
    engine.stop()


def test_equal_names_give_equal_rollouts(play: Callable[[], list[RolloutCalls]]) -> None:
    first, second = ([[call.sampled_ids.tolist() for call in rollout.calls] for rollout in play()] for _ in range(2))
    assert first == second


def test_each_conversation_becomes_a_sample_and_every_sampled_token_trains(
    play: Callable[[], list[RolloutCalls]],
) -> None:
    built = [build_samples(rollout, Limits(1024, 1024)) for rollout in play()]
    assert all(2 <= len(each.samples) <= 5 for each in built)
    assert len({len(each.samples) for each in built}) > 1
    assert all(each.report.trained_share == 1.0 for each in built)


def test_some_rollouts_succeed_and_some_do_not(play: Callable[[], list[RolloutCalls]]) -> None:
    assert {rollout.reward for rollout in play()} == {0.0, 1.0}
