from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.calls import VersionSpan
from agl_runtime.schemas import PolicyVersion, Rollout, RolloutMetadata, RolloutState
from agl_runtime.trainer import rollouts
from agl_runtime.trainer.data import Task
from agl_runtime.trainer.rollouts import RolloutDesk, Work, is_orphan, of_lineage, recipe
from fakes.gateway import End, FakeGateway
from fakes.trained import make_call, make_calls
from fakes.training import make_project

WORK = Work("r1", PolicyVersion(1, 4), "7", Task("t", {"q": 1}), 3, 5, True, "abcd")


def test_the_rollouts_of_a_group_are_named_after_all_that_decides_them() -> None:
    assert WORK.rollout_ids == tuple(f"{WORK.group_id}-{index}" for index in range(3))
    assert WORK.group_id.startswith("r1-1.4-7-")
    assert replace(WORK, step=9, size=4).rollout_ids[:3] == WORK.rollout_ids


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "r2"},
        {"version": PolicyVersion(2, 4)},
        {"place": "8"},
        {"task": Task("t", {"q": 2})},
        {"recipe": "efgh"},
    ],
)
def test_work_that_differs_never_shares_a_rollout(change: dict[str, Any]) -> None:
    assert not set(replace(WORK, **change).rollout_ids) & set(WORK.rollout_ids)


def test_the_recipe_holds_what_decides_a_rollout_and_nothing_else() -> None:
    def of(**settings: str) -> str:
        chosen = {name.replace("__", "."): value for name, value in settings.items()}
        return recipe(make_project(Path("p"), chosen).config)

    assert of(agent__concurrency="3", train__lr="0.5", train__steps="9") == of()
    different = {of(), of(train__temperature="0.5"), of(agent__timeout_s="9"), of(reward__function="other.py:score")}
    assert len(different) == 4


async def test_results_come_once_all_rollouts_of_the_work_have_ended_whoever_enqueued_them() -> None:
    gateway = FakeGateway(lambda rollout: None)
    await gateway.add_rollouts(WORK.creates(10.0)[:1])
    gateway.end(WORK.rollout_ids[0], End(1.0))
    desk = RolloutDesk(gateway, 10.0)  # type: ignore[arg-type]
    await desk.open()
    watching = asyncio.create_task(desk.watch())
    await desk.enqueue([WORK])
    results = asyncio.create_task(desk.results(WORK))
    gateway.end(WORK.rollout_ids[2], End(None, "the agent could not be started"))
    gateway.end(WORK.rollout_ids[1], End(0.5, cpu_s=None))
    ended = await results
    watching.cancel()
    assert [item.rollout_id for item in ended] == list(WORK.rollout_ids)
    assert [item.reward for item in ended] == [1.0, 0.5, None]
    assert [item.error for item in ended] == [None, None, "the agent could not be started"]
    assert [item.cpu_s for item in ended] == [0.25, None, 0.25]


async def test_a_rollout_that_is_deleted_while_it_is_waited_for_counts_as_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollouts, "POLL_WAIT_S", 0.01)
    gateway = FakeGateway(lambda rollout: None)
    desk = RolloutDesk(gateway, 10.0)  # type: ignore[arg-type]
    await desk.open()
    await desk.enqueue([WORK])
    results = asyncio.create_task(desk.results(WORK))
    for name in WORK.rollout_ids[:2]:
        gateway.end(name, End(1.0))
    del gateway.rollouts_by_id[WORK.rollout_ids[2]]
    watching = asyncio.create_task(desk.watch())
    ended = await asyncio.wait_for(results, 20)
    watching.cancel()
    assert [(item.reward, item.error) for item in ended] == [(1.0, None), (1.0, None), (None, rollouts.DELETED)]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 1.7e308, -1.01e100])
async def test_a_reward_that_cannot_be_reckoned_with_is_none_and_says_why(reward: float) -> None:
    gateway = FakeGateway(lambda rollout: End(reward))
    desk = RolloutDesk(gateway, 10.0)  # type: ignore[arg-type]
    await desk.enqueue([WORK])
    ended = await desk.results(WORK)
    assert [item.reward for item in ended] == [None] * 3
    assert {item.error for item in ended} == {f"its reward is {reward:g}, which is not within +-1e+100"}


@pytest.mark.parametrize("reward", [1e100, -1e100])
async def test_the_largest_rewards_can_be_reckoned_with(reward: float) -> None:
    desk = RolloutDesk(FakeGateway(lambda rollout: End(reward)), 10.0)  # type: ignore[arg-type]
    await desk.enqueue([WORK])
    assert [item.reward for item in await desk.results(WORK)] == [reward] * 3


async def test_cancelling_ends_more_orphans_than_one_page_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "PAGE", 2)
    gateway = FakeGateway(lambda rollout: None)
    await gateway.add_rollouts(WORK.creates(10.0))
    await RolloutDesk(gateway, 10.0).cancel(lambda rollout: True)  # type: ignore[arg-type]
    assert gateway.unfinished() == []


@pytest.mark.parametrize(
    ("about", "orphan"),
    [
        ({"run_id": "r1", "weights": "1.4", "recipe": "abcd"}, False),
        ({"run_id": "r2", "weights": "1.4", "recipe": "abcd"}, True),
        ({"run_id": "r1", "weights": "1.5", "recipe": "abcd"}, True),
        ({"run_id": "r1", "weights": "1.4", "recipe": "efgh"}, True),
        ({"run_id": "r1"}, False),
        ({}, False),
        ({"run_id": "r1", "weights": "1.2", "recipe": "abcd", "group_id": "carried"}, False),
        ({"run_id": "r1", "weights": "1.2", "recipe": "abcd", "group_id": "dropped"}, True),
    ],
)
async def test_only_what_a_trainer_enqueued_for_something_else_is_an_orphan(
    about: dict[str, str], orphan: bool
) -> None:
    (rollout,) = await FakeGateway(lambda rollout: None).add_rollouts(WORK.creates(10.0)[:1])
    changed: Rollout = rollout.model_copy(update={"metadata": RolloutMetadata.model_validate(about)})
    assert is_orphan(changed, "r1", PolicyVersion(1, 4), "abcd", {"carried"}) is orphan


async def test_ending_what_has_ended_or_is_deleted_changes_nothing() -> None:
    gateway = FakeGateway(lambda rollout: None)
    await gateway.add_rollouts(WORK.creates(10.0)[:2])
    gateway.end(WORK.rollout_ids[0], End(1.0))
    await RolloutDesk(gateway, 10.0).end(WORK.rollout_ids)  # type: ignore[arg-type]
    states = [gateway.rollouts_by_id[name].status.state for name in WORK.rollout_ids[:2]]
    assert states == [RolloutState.SUCCEEDED, RolloutState.FAILED]


async def test_what_a_trainer_ended_itself_is_enqueued_anew_under_another_name_and_the_rest_is_found_again() -> None:
    gateway = FakeGateway(lambda rollout: None)
    first, second, third = WORK.rollout_ids
    for _ in range(2):
        desk = RolloutDesk(gateway, 10.0)  # type: ignore[arg-type]
        await desk.enqueue([WORK])
        if second in gateway.unfinished():
            gateway.end(second, End(None, "the agent could not be started"))
            gateway.end(third, End(1.0))
        await desk.end(WORK.rollout_ids)
        assert gateway.unfinished() == []
    desk = RolloutDesk(gateway, 10.0)  # type: ignore[arg-type]
    await desk.enqueue([WORK])
    assert gateway.unfinished() == [f"{first}-2"]
    watching = asyncio.create_task(desk.watch())
    gateway.end(f"{first}-2", End(0.5))
    ended = await asyncio.wait_for(desk.results(WORK), 20)
    watching.cancel()
    assert [(item.rollout_id, item.reward) for item in ended] == [(f"{first}-2", 0.5), (second, None), (third, 1.0)]
    assert gateway.rollouts_by_id[f"{first}-2"].metadata == gateway.rollouts_by_id[first].metadata


@pytest.mark.parametrize(
    ("version", "updates"),
    [((1, 2), 2), ((1, 3), 3), ((1, 4), -1), ((2, 5), -1), ((3, 3), 3), ((3, 7), 7)],
)
def test_tokens_of_weights_that_a_crash_took_are_of_no_known_update(version: tuple[int, int], updates: int) -> None:
    call = make_call("r")
    calls = make_calls("r", 1.0, replace(call, spans=(VersionSpan(0, 3, PolicyVersion(*version)),)))
    named = of_lineage(calls, PolicyVersion(3, 3))
    assert [span.version.updates for call in named.calls for span in call.spans] == [updates]
    assert [span.version.updates for call in calls.calls for span in call.spans] == [version[1]]
