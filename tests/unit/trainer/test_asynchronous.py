"""Whole runs with more groups under way than an update takes, against a gateway and a backend that live in the test."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agl_runtime.schemas import Rollout, RolloutState
from fakes.gateway import End, FakeGateway, by_index
from fakes.training import KillAt, Killed, lineage, make_project, places, read_lines, read_summary, run_trainer

RUN = Path("project")
ONE_OF_TWO = {"train.groups_per_step": "1", "train.active_groups": "2", "data.val": "null"}
TWO_OF_FOUR = {"train.active_groups": "4", "data.val": "null"}


def but_slow(*places: str) -> FakeGateway:
    """Agents are done at once, but those of the groups at these places are for the test to end."""

    def agent(rollout: Rollout) -> End | None:
        return None if rollout.rollout_id.split("-")[2] in places else by_index(rollout)

    return FakeGateway(agent)


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def in_any_order(gateway: FakeGateway, seed: int) -> AsyncIterator[FakeGateway]:
    gateway.agent = lambda rollout: None
    task = asyncio.create_task(gateway.end_in_any_order(random.Random(seed)))
    yield gateway
    task.cancel()


def groups(weights: list[list[str]]) -> list[list[str]]:
    return [sorted({group for group, _ in ids}) for ids in places(weights)]


async def test_a_group_that_is_unfinished_at_an_update_is_trained_on_later_as_stale_as_it_is() -> None:
    project, gateway = make_project(RUN, ONE_OF_TWO), but_slow("0")
    trainer = asyncio.create_task(run_trainer(project, gateway))
    await until(lambda: "1.2" in gateway.records)
    for rollout_id in gateway.unfinished():
        gateway.end(rollout_id, by_index(gateway.rollouts_by_id[rollout_id]))
    backend = await trainer
    assert groups(backend.weights) == [["1"], ["2"], ["0"]]
    figures = [(line["staleness_mean"], line["staleness_max"], line["groups_dropped"]) for line in read_lines(project)]
    assert figures == [(0, 0, 0), (0, 0, 0), (2, 2, 0)]


async def test_a_group_that_becomes_too_stale_is_dropped_its_agents_are_ended_and_another_takes_its_place() -> None:
    project, gateway = make_project(RUN, {**ONE_OF_TWO, "train.max_staleness": "1"}), but_slow("0")
    backend = await run_trainer(project, gateway)
    assert groups(backend.weights) == [["1"], ["2"], ["3"]]
    assert [line["groups_dropped"] for line in read_lines(project)] == [0, 0, 1]
    dropped = [item.status for name, item in gateway.rollouts_by_id.items() if name.split("-")[2] == "0"]
    assert {(status.state, status.error_message) for status in dropped} == {
        (RolloutState.FAILED, "The trainer no longer needs it.")
    }


async def test_what_was_finished_before_sampling_went_on_counts_towards_the_next_update() -> None:
    project, gateway, stop = make_project(RUN, TWO_OF_FOUR), but_slow("3", "4", "5"), asyncio.Event()
    trainer = asyncio.create_task(run_trainer(project, gateway, stop=stop))
    await until(lambda: bool(gateway.records) and gateway.statuses[-1].waiting_for == "1 of 2 groups")
    assert gateway.statuses[-1].detail["step"] == 1
    stop.set()
    await trainer


async def test_every_step_has_its_line_also_when_the_next_batch_is_there_already() -> None:
    project = make_project(RUN, {**ONE_OF_TWO, "train.active_groups": "5", "train.save_every": "9"})
    await run_trainer(project, FakeGateway())
    assert [line["step"] for line in read_lines(project)] == [1, 2, 3]


async def test_a_group_that_is_dropped_when_a_run_resumes_leaves_no_agent_at_work() -> None:
    project, gateway, stop = make_project(RUN, {**ONE_OF_TWO, "train.steps": "9"}), but_slow("0", "3"), asyncio.Event()
    trainer = asyncio.create_task(run_trainer(project, gateway, stop=stop))
    await until(lambda: "1.2" in gateway.records and len(gateway.unfinished()) == 4)
    stop.set()
    await trainer
    gateway.agent = by_index
    again = asyncio.create_task(run_trainer(make_project(RUN, {**ONE_OF_TWO, "train.max_staleness": "1"}), gateway))
    await until(lambda: len(gateway.unfinished()) == 2)
    assert {name.split("-")[2] for name in gateway.unfinished()} == {"3"}
    for rollout_id in gateway.unfinished():
        gateway.end(rollout_id, End(float(rollout_id.endswith("-1"))))
    assert len((await again).weights) == 3
    assert gateway.unfinished() == []


async def test_groups_dropped_after_a_checkpoint_use_up_no_step_of_a_run_resumed_with_other_limits() -> None:
    settings = {**ONE_OF_TWO, "train.active_groups": "4", "train.max_staleness": "0"}
    project, gateway, stop = make_project(RUN, settings), but_slow("0", "2", "3", "4", "5"), asyncio.Event()
    trainer = asyncio.create_task(run_trainer(project, gateway, stop=stop))
    await until(lambda: "1.1" in gateway.records and len(gateway.unfinished()) == 4)
    stop.set()
    await trainer
    gateway.agent = by_index
    for rollout_id in gateway.unfinished():
        gateway.end(rollout_id, by_index(gateway.rollouts_by_id[rollout_id]))
    backend = await run_trainer(make_project(RUN, {**ONE_OF_TWO, "train.active_groups": "1"}), gateway)
    first, *rest = groups(backend.weights)
    assert first == ["1"]
    assert len(rest) == 2
    assert {group for batch in rest for group in batch} < {"0", "2", "3"}
    assert [(line["skipped"], line["failed"]) for line in read_lines(project)] == [(None, 0)] * 3


@pytest.mark.parametrize("finish", [1, 2, 3])
async def test_a_run_killed_while_it_drops_a_group_loses_no_rollout_of_it_at_the_checkpoint_before(finish: int) -> None:
    settings = {**ONE_OF_TWO, "train.max_staleness": "0", "train.save_every": "2"}
    project, gateway = make_project(RUN, settings), but_slow("0")
    with contextlib.suppress(Killed):
        await run_trainer(project, gateway, KillAt(finish, "finish"))
    gateway.agent = by_index
    again = asyncio.create_task(run_trainer(project, gateway))
    await until(lambda: gateway.unfinished() or again.done())
    for rollout_id in gateway.unfinished():
        gateway.end(rollout_id, by_index(gateway.rollouts_by_id[rollout_id]))
    await again
    assert [(line["skipped"], line["failed"]) for line in read_lines(project)] == [(None, 0)] * 3


@pytest.mark.parametrize("save_every", ["1", "2"])
async def test_killed_at_any_moment_every_group_is_trained_once(save_every: str, tmp_path: Path) -> None:
    settings = {**TWO_OF_FOUR, "train.save_every": save_every, "train.max_staleness": "null"}
    counter = KillAt()
    async with in_any_order(FakeGateway(), 0) as gateway:
        await run_trainer(make_project(tmp_path / "whole", settings), gateway, counter)
    for moment in range(1, len(counter.names)):
        project = make_project(tmp_path / str(moment), settings)
        async with in_any_order(FakeGateway(), moment) as gateway:
            weights, _ = await lineage(project, gateway, [moment])
        where = f"killed at {counter.names[moment - 1]}, moment {moment}"
        assert sorted(group for batch in groups(weights) for group in batch) == list("012345"), where
        assert [len(set(ids)) for ids in weights] == [4, 4, 4], where
        assert [line["step"] for line in read_lines(project)] == [1, 2, 3], where
        assert gateway.unfinished() == [], where
        assert not gateway.is_paused, where
        assert read_summary(project)["ended"] == "complete", where


async def test_killed_again_and_again_no_rollout_is_trained_twice_nor_too_stale(tmp_path: Path) -> None:
    settings = {**TWO_OF_FOUR, "train.max_staleness": "1", "train.steps": "6"}
    project = make_project(tmp_path, settings)
    async with in_any_order(FakeGateway(), 0) as gateway:
        weights, killed = await lineage(project, gateway, [20, 40, 30, 25, 45, 35])
    assert killed >= 5
    trained = [name for ids in weights for name in ids]
    assert len(trained) == len(set(trained)) == 24
    assert max(line["staleness_max"] for line in read_lines(project)) <= 1
