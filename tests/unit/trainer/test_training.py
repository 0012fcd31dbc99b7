"""Whole runs of the trainer against a gateway and a backend that live in the test."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from pathlib import Path

import pytest

from agl_runtime.errors import TrainerError
from agl_runtime.schemas import Rollout
from agl_runtime.trainer.backends.base import BatchTotals
from agl_runtime.trainer.state import checkpoints
from fakes.gateway import End, FakeGateway, by_index
from fakes.training import KillAt, lineage, make_project, places, read_lines, read_summary, run_trainer

RUN = Path("project")


def index_of(rollout: Rollout) -> int:
    return int((rollout.metadata.model_extra or {})["index"])


def task_of(rollout: Rollout) -> str:
    return str((rollout.metadata.model_extra or {})["task_id"])


async def test_a_run_validates_trains_every_batch_saves_and_validates_again() -> None:
    project, gateway = make_project(RUN), FakeGateway()
    backend = await run_trainer(project, gateway)
    lines = read_lines(project)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("validation", 0),
        ("step", 1),
        ("step", 2),
        ("step", 3),
        ("validation", 3),
    ]
    assert [line["version"] for line in lines] == ["0.0", "1.1", "1.2", "1.3", "1.3"]
    assert [len(ids) for ids in backend.weights] == [4, 4, 4]
    assert backend.totals == [BatchTotals(4, 4, 12)] * 3
    assert gateway.named[-1].policy_version == (1, 3)
    assert backend.is_stopped


async def test_the_summary_holds_what_the_run_came_to() -> None:
    project = make_project(RUN)
    await run_trainer(project, FakeGateway())
    content = read_summary(project)
    assert (content["ended"], content["reason"], content["steps"], content["version"]) == ("complete", None, 3, "1.3")
    assert (content["before"]["pass_at_1"], content["after"]["pass_at_1"]) == (0.0, 0.0)
    assert content["checkpoint"] == str(project.state_dir / "checkpoints" / "1.3")
    assert content["agent_cpu_s_total"] == 16 * 0.25
    assert content["logprob_gap_max"] == 1e-6


async def test_a_step_takes_the_next_tasks_and_says_so_in_its_rollouts() -> None:
    project, gateway = make_project(RUN), FakeGateway()
    await run_trainer(project, gateway)
    trained = [item for item in gateway.rollouts_by_id.values() if item.is_train]
    assert [task_of(item) for item in trained[::2]] == [f"train-{n % 4}" for n in range(6)]
    first = trained[0]
    extra = first.metadata.model_extra or {}
    assert first.input == {"id": "train-0", "q": 0}
    assert first.rollout_id == f"{extra['group_id']}-0"
    assert (extra["index"], extra["step"], extra["weights"]) == (0, 1, "0.0")
    assert first.rollout_id.startswith(f"{read_summary(project)['run_id']}-0.0-0-")
    assert first.config.timeout_seconds == 600


async def test_weights_change_only_while_calls_are_held_and_none_is_in_flight() -> None:
    gateway = FakeGateway()
    await run_trainer(make_project(RUN, {"train.steps": "1", "data.val": "null"}), gateway)
    log = gateway.log
    assert log[log.index("pause") :][:4] == ["pause", "proxy_state", "proxy_state", "register_model"]
    assert log[log.index("register_model", log.index("pause")) + 1] == "resume"
    assert not gateway.is_paused


async def test_calls_go_on_after_an_update_that_failed() -> None:
    project, gateway = make_project(RUN), FakeGateway()

    def fail(name: str) -> None:
        if name == "updated":
            raise TrainerError("The loss is not finite.", "Lower train.lr.")

    with pytest.raises(TrainerError, match="The loss is not finite"):
        await run_trainer(project, gateway, fail)
    assert gateway.log.count("pause") == 1
    assert not gateway.is_paused
    assert gateway.models == []
    assert read_summary(project)["ended"] == "failed"
    assert read_summary(project)["reason"] == "The loss is not finite. Lower train.lr."


async def test_calls_that_never_end_make_the_update_give_up_and_not_hang() -> None:
    project, gateway = make_project(RUN, {"gateway.upstream_timeout_s": "0.2"}), FakeGateway()
    gateway.inflight = 2
    with pytest.raises(TrainerError, match="2 model calls did not end within"):
        await run_trainer(project, gateway)
    assert not gateway.is_paused


async def test_what_was_trained_is_recorded_with_the_checkpoint_that_holds_it() -> None:
    project, gateway = make_project(RUN, {"train.save_every": "2"}), FakeGateway()
    await run_trainer(project, gateway)
    assert sorted(gateway.records) == ["1.2", "1.3"]
    assert [len(gateway.records[version].rollout_ids) for version in ("1.2", "1.3")] == [8, 4]
    assert gateway.records["1.2"].step == 2


async def test_only_the_newest_checkpoints_are_kept() -> None:
    project = make_project(RUN, {"train.steps": "5", "train.keep_checkpoints": "2"})
    await run_trainer(project, FakeGateway())
    assert [item.folder.name for item in checkpoints(project.state_dir)] == ["1.4", "1.5"]


async def test_validation_runs_where_asked_with_as_many_rollouts_a_task_as_asked() -> None:
    project = make_project(RUN, {"train.steps": "4", "eval.every": "2", "eval.samples": "3", "eval.limit": "1"})
    await run_trainer(project, FakeGateway())
    validations = [line for line in read_lines(project) if line["kind"] == "validation"]
    assert [(line["step"], line["tasks"], line["rollouts"]) for line in validations] == [
        (0, 1, 3),
        (2, 1, 3),
        (4, 1, 3),
    ]


async def test_without_validation_tasks_only_steps_are_measured() -> None:
    project = make_project(RUN, {"data.val": "null"})
    await run_trainer(project, FakeGateway())
    assert {line["kind"] for line in read_lines(project)} == {"step"}
    assert read_summary(project)["before"] is None
    assert read_summary(project)["after"] is None


async def test_a_rollout_without_a_reward_is_counted_and_left_out_of_its_group() -> None:
    def agent(rollout: Rollout) -> End:
        lost = task_of(rollout) == "train-0" and index_of(rollout) == 2
        return End(None, "the agent could not be started") if lost else by_index(rollout)

    project = make_project(RUN, {"train.steps": "1", "train.group_size": "3"})
    backend = await run_trainer(project, FakeGateway(agent))
    step = next(line for line in read_lines(project) if line["kind"] == "step")
    assert (step["rollouts"], step["scored"], step["failed"]) == (6, 5, 1)
    assert len(backend.weights[0]) == 5


async def test_a_step_whose_rollouts_all_failed_is_passed_over_and_the_next_one_runs() -> None:
    def agent(rollout: Rollout) -> End:
        return End(None, "no space left") if task_of(rollout) in ("train-2", "train-3") else by_index(rollout)

    project = make_project(RUN)
    backend = await run_trainer(project, FakeGateway(agent))
    steps = [line for line in read_lines(project) if line["kind"] == "step"]
    assert [line["skipped"] for line in steps] == [
        None,
        "all 4 rollouts ended without a reward, most often: no space left",
        None,
    ]
    assert steps[1]["reward_mean"] is None
    assert all(math.isfinite(value) for line in steps for value in line.values() if isinstance(value, float))
    assert len(backend.weights) == 2
    assert read_summary(project)["version"] == "1.2"


async def test_a_group_without_spread_costs_no_compute_and_changes_no_others_weight() -> None:
    def agent(rollout: Rollout) -> End:
        return End(1.0) if task_of(rollout) == "train-0" else by_index(rollout)

    project = make_project(RUN, {"train.steps": "1"})
    backend = await run_trainer(project, FakeGateway(agent))
    assert len(backend.weights[0]) == 2
    assert backend.totals == [BatchTotals(rollouts=4, samples=4, tokens=12)]
    step = next(line for line in read_lines(project) if line["kind"] == "step")
    assert (step["groups"], step["groups_without_spread"]) == (2, 1)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (End(0.0), "too hard"),
        (End(1.0), "too easy"),
        (End(0.0, calls=0), "No agent made a model call"),
        (
            End(None, "the reward function raised"),
            "Every rollout failed, most often because: the reward function raised",
        ),
    ],
)
async def test_a_run_without_signal_ends_with_the_cause_and_the_remedy(end: End, cause: str) -> None:
    project = make_project(RUN, {"data.val": "null"})
    backend = await run_trainer(project, FakeGateway(lambda rollout: end))
    content = read_summary(project)
    assert (content["ended"], content["steps"]) == ("no_signal", 2)
    assert content["reason"].startswith("No signal: none of the first 2 steps")
    assert cause in content["reason"]
    assert backend.weights == []


async def test_rewards_that_differ_over_calls_that_cannot_be_trained_on_are_no_signal_either() -> None:
    project = make_project(RUN, {"data.val": "null"})
    agent = FakeGateway(lambda rollout: End(float(index_of(rollout)), untrainable="no_logprobs"))
    await run_trainer(project, agent)
    assert read_summary(project)["ended"] == "no_signal"
    assert "can be trained on: no_logprobs" in read_summary(project)["reason"]


async def test_after_no_signal_the_same_command_begins_a_new_run() -> None:
    project, gateway = make_project(RUN), FakeGateway(lambda rollout: End(0.0))
    await run_trainer(project, gateway)
    first = read_summary(project)["run_id"]
    gateway.agent = by_index
    await run_trainer(project, gateway)
    assert read_summary(project)["ended"] == "complete"
    assert read_summary(project)["run_id"] != first
    assert {line["run_id"] for line in read_lines(project)} == {read_summary(project)["run_id"]}


async def test_a_complete_run_begun_again_says_so_and_starts_nothing() -> None:
    project, gateway = make_project(RUN), FakeGateway()
    await run_trainer(project, gateway)
    lines, first, calls = read_lines(project), read_summary(project), len(gateway.log)
    backend = await run_trainer(project, gateway)
    again = read_summary(project)
    assert again["reason"].endswith("is complete: 3 steps were done before. Raise train.steps to continue it.")
    assert {**again, "reason": None, "finished_at": 0} == {**first, "finished_at": 0, "seconds": again["seconds"]} | {
        "train_seconds": again["train_seconds"]
    }
    assert read_lines(project) == lines
    assert len(gateway.log) == calls
    assert not backend.is_stopped


async def test_more_steps_continue_a_complete_run() -> None:
    project, gateway = make_project(RUN), FakeGateway()
    await run_trainer(project, gateway)
    backend = await run_trainer(make_project(RUN, {"train.steps": "4"}), gateway)
    assert len(backend.weights) == 4
    assert read_summary(project)["version"] == "2.4"
    assert [line["step"] for line in read_lines(project) if line["kind"] == "step"] == [1, 2, 3, 4]


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_stop_while_sampling_keeps_what_was_trained_and_a_second_start_goes_on() -> None:
    project, stop = make_project(RUN), asyncio.Event()
    gateway = FakeGateway(
        lambda rollout: None if task_of(rollout) == "train-3" and rollout.is_train else by_index(rollout)
    )
    trainer = asyncio.create_task(run_trainer(project, gateway, stop=stop))
    await until(lambda: len(gateway.unfinished()) == 2)
    stop.set()
    await trainer
    assert (read_summary(project)["ended"], read_summary(project)["steps"]) == ("stopped", 1)
    waiting = gateway.unfinished()
    again = asyncio.create_task(run_trainer(project, gateway))
    await until(lambda: gateway.models and gateway.models[0].run_epoch == 2)
    for rollout_id in waiting:
        gateway.end(rollout_id, by_index(gateway.rollouts_by_id[rollout_id]))
    backend = await again
    assert set(waiting) <= set(backend.weights[1])
    assert read_summary(project)["ended"] == "complete"


async def test_a_stop_while_validating_ends_at_once_and_the_validation_is_found_again() -> None:
    project, stop = make_project(RUN), asyncio.Event()
    gateway = FakeGateway(lambda rollout: by_index(rollout) if rollout.is_train else None)
    trainer = asyncio.create_task(run_trainer(project, gateway, stop=stop))
    await until(lambda: len(gateway.unfinished()) == 2)
    stop.set()
    await trainer
    assert read_summary(project)["steps"] == 0
    held = gateway.unfinished()
    again = asyncio.create_task(run_trainer(project, gateway))
    gateway.agent = by_index
    for rollout_id in held:
        gateway.end(rollout_id, End(1.0))
    await again
    assert read_summary(project)["before"]["pass_at_1"] == 1.0


async def test_a_stop_asked_before_the_policy_serves_begins_nothing() -> None:
    project, gateway, stop = make_project(RUN), FakeGateway(), asyncio.Event()
    stop.set()
    await run_trainer(project, gateway, stop=stop)
    assert gateway.rollouts_by_id == {}
    assert read_summary(project)["ended"] == "stopped"


async def test_a_rollout_deleted_before_it_was_read_counts_as_failed() -> None:
    project, gateway = (
        make_project(RUN, {"train.steps": "1", "train.group_size": "3", "data.val": "null"}),
        FakeGateway(),
    )
    gateway.deleted = 1
    await run_trainer(project, gateway)
    (step,) = read_lines(project)
    assert (step["rollouts"], step["failed"]) == (6, 1)


async def test_rollouts_that_nobody_waits_for_any_more_are_ended() -> None:
    project = make_project(RUN)
    gateway = FakeGateway(lambda rollout: None)
    stop = asyncio.Event()
    trainer = asyncio.create_task(run_trainer(project, gateway, stop=stop))
    await until(lambda: len(gateway.unfinished()) == 2)
    stop.set()
    await trainer
    left = gateway.unfinished()
    gateway.agent = by_index
    await run_trainer(make_project(RUN, {"train.temperature": "0.7"}), gateway)
    errors = [gateway.rollouts_by_id[name].status.error_message for name in left]
    assert errors == ["The trainer no longer needs it."] * 2


async def test_rollouts_ended_for_another_recipe_are_enqueued_anew_when_the_first_recipe_comes_back() -> None:
    project, gateway = make_project(RUN), FakeGateway(lambda rollout: None)
    for settings in ({}, {"train.temperature": "0.7"}):
        stop = asyncio.Event()
        trainer = asyncio.create_task(run_trainer(make_project(RUN, settings), gateway, stop=stop))
        await until(lambda: len(gateway.unfinished()) == 2)
        stop.set()
        await trainer
    gateway.agent = by_index
    await run_trainer(project, gateway)
    assert read_summary(project)["before"]["rollouts"] == 2
    assert [line["failed"] for line in read_lines(project)] == [0] * 5


async def test_steps_that_were_skipped_at_the_end_are_done_when_more_steps_continue_the_run() -> None:
    def agent(rollout: Rollout) -> End:
        return End(None, "no space left") if task_of(rollout) in ("train-2", "train-3") else by_index(rollout)

    settings = {"train.groups_per_step": "1", "train.steps": "4", "data.val": "null"}
    project, gateway = make_project(RUN, settings), FakeGateway(agent)
    await run_trainer(project, gateway)
    assert [len(item.rollout_ids) for item in gateway.records.values()] == [2, 6]
    first = read_lines(project)
    backend = await run_trainer(make_project(RUN, {**settings, "train.steps": "6"}), gateway)
    lines = read_lines(project)
    assert lines[:4] == first
    assert [(line["step"], bool(line["skipped"])) for line in lines] == [
        (1, False),
        (2, False),
        (3, True),
        (4, True),
        (5, False),
        (6, False),
    ]
    assert [sorted({place for place, _ in ids}) for ids in places(backend.weights)] == [["0"], ["1"], ["4"], ["5"]]


async def test_a_gateway_that_began_anew_is_told_where_the_policy_is() -> None:
    project, stop = make_project(RUN), asyncio.Event()
    gateway = FakeGateway(lambda rollout: None)
    trainer = asyncio.create_task(run_trainer(project, gateway, stop=stop))
    await until(lambda: gateway.known_parts and gateway.models)
    gateway.forget()
    await until(lambda: bool(gateway.models))
    assert gateway.models[0].model == "policy"
    stop.set()
    await trainer


async def test_the_trainer_reports_what_it_does_and_waits_for() -> None:
    project, stop = make_project(RUN, {"data.val": "null"}), asyncio.Event()
    gateway = FakeGateway(lambda rollout: None if task_of(rollout) == "train-1" else by_index(rollout))
    trainer = asyncio.create_task(run_trainer(project, gateway, stop=stop))
    await until(lambda: bool(gateway.statuses) and gateway.statuses[-1].waiting_for == "1 of 2 groups")
    detail = gateway.statuses[-1].detail
    assert (detail["phase"], detail["step"], detail["steps"]) == ("sampling", 0, 3)
    assert (detail["groups_done"], detail["groups_total"]) == (1, 2)
    stop.set()
    await trainer
    assert gateway.statuses[-1].detail["phase"] == "done"


@pytest.mark.parametrize("save_every", ["1", "2"])
async def test_killed_at_any_moment_a_run_trains_nothing_twice_and_loses_nothing(
    save_every: str, tmp_path: Path
) -> None:
    settings = {"train.save_every": save_every, "data.val": "null"}
    counter = KillAt()
    whole = await run_trainer(make_project(tmp_path / "whole", settings), FakeGateway(), counter)
    last = 1
    for moment in range(1, len(counter.names) + 1):
        project, gateway = make_project(tmp_path / str(moment), settings), FakeGateway()
        weights, killed = await lineage(project, gateway, [moment])
        assert killed == 1
        assert places(weights) == places(whole.weights), f"killed at {counter.names[moment - 1]}"
        assert max(Counter(name for ids in weights for name in ids).values()) == 1
        steps = [line["step"] for line in read_lines(project) if line["kind"] == "step"]
        assert steps == sorted(set(steps))
        assert steps[-1] == 3
        assert gateway.unfinished() == []
        assert not gateway.is_paused
        assert read_summary(project)["ended"] == "complete"
        last = moment
    assert last == len(counter.names) > 30


async def test_killed_again_and_again_a_run_still_ends_with_the_same_lineage(tmp_path: Path) -> None:
    whole = await run_trainer(make_project(tmp_path / "whole"), FakeGateway())
    project = make_project(tmp_path / "killed")
    weights, killed = await lineage(project, FakeGateway(), [5, 23, 9, 31, 40, 28, 12])
    assert killed >= 5
    assert places(weights) == places(whole.weights)
    epochs = json.loads((project.state_dir / "run.json").read_text())["epoch"]
    assert epochs == 8


async def test_with_a_checkpoint_after_every_update_a_killed_run_samples_no_rollout_anew(tmp_path: Path) -> None:
    counter = KillAt()
    whole = FakeGateway()
    await run_trainer(make_project(tmp_path / "whole"), whole, counter)
    for moment in range(1, len(counter.names) + 1, 3):
        gateway = FakeGateway()
        await lineage(make_project(tmp_path / str(moment)), gateway, [moment])
        assert len(gateway.rollouts_by_id) == len(whole.rollouts_by_id), f"killed at {counter.names[moment - 1]}"
