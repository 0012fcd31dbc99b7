from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.config import Project
from agl_runtime.errors import ConfigError, TrainerError
from agl_runtime.part import Part
from agl_runtime.schemas import PolicyVersion, RolloutConfig, RolloutCreate, RolloutMetadata
from agl_runtime.trainer.data import Task
from agl_runtime.trainer.modes import Outside, Stopped, evaluate, serve, train
from agl_runtime.trainer.rollouts import Work
from fakes.backend import FakeBackend
from fakes.gateway import End, FakeGateway
from fakes.training import make_part, make_project, read_lines, read_summary, run_trainer

RUN = Path("project")
HUGE = 1.7e308


def outside(gateway: FakeGateway, backend: FakeBackend | None = None) -> Outside:
    async def connect(part: Part) -> Any:
        return gateway

    return Outside(make_backend=lambda config, policy: backend or FakeBackend(), connect=connect)


def broken(name: str) -> None:
    if name == "start":
        raise TrainerError("The model does not load.", "Fetch it again.")


def left_behind(run_id: str, *, is_train: bool = False) -> RolloutCreate:
    return Work(run_id, PolicyVersion(1, 0), f"{is_train}", Task("t", {"q": 1}), 1, 0, is_train, "abcd").creates(9.0)[0]


def from_a_client(name: str, **about: str) -> RolloutCreate:
    metadata = RolloutMetadata.model_validate(about)
    return RolloutCreate(input={}, is_train=False, config=RolloutConfig(), metadata=metadata, rollout_id=name)


async def test_an_evaluation_ends_what_an_interrupted_one_left_and_nothing_else() -> None:
    project = make_project(RUN)
    gateway = FakeGateway(lambda rollout: None)
    others = [
        left_behind("20261130-run"),
        left_behind("20261130-run", is_train=True),
        from_a_client("plain"),
        from_a_client("named", run_id="eval-1"),
    ]
    await gateway.add_rollouts([left_behind("eval-0a"), left_behind("eval-0b"), *others])
    gateway.agent = lambda rollout: End(1.0)
    await evaluate(make_part(project), asyncio.Event(), outside(gateway))
    assert gateway.unfinished() == [str(item.rollout_id) for item in others]
    assert read_summary(project)["after"]["rollouts"] == 2


async def test_a_reward_too_large_to_reckon_with_is_a_failed_rollout_in_an_evaluation() -> None:
    project = make_project(RUN, val=3)
    ends = iter([End(HUGE), End(-HUGE), End(1.0)])
    await evaluate(make_part(project), asyncio.Event(), outside(FakeGateway(lambda rollout: next(ends))))
    after = read_summary(project)["after"]
    assert (after["rollouts"], after["reward_mean"]) == (1, 1.0)


async def test_a_reward_too_large_to_reckon_with_is_a_failed_rollout_in_a_run() -> None:
    def agent(rollout: Any) -> End:
        return End([HUGE, HUGE, 0.0, 1.0][(rollout.metadata.model_extra or {})["index"] % 4])

    project = make_project(RUN, {"train.steps": "1", "train.group_size": "4", "eval.samples": "4"})
    backend = await run_trainer(project, FakeGateway(agent))
    before, step, _ = read_lines(project)
    assert (step["failed"], step["scored"], step["reward_mean"], step["reward_std"]) == (4, 4, 0.5, 0.5)
    assert before["reward_mean"] == 0.5
    assert [len(ids) for ids in backend.weights] == [4]


async def test_a_base_policy_that_does_not_load_is_a_fault_of_the_configuration() -> None:
    for mode in (train, evaluate, serve):
        gateway = FakeGateway()
        with pytest.raises(ConfigError, match=r"^The model does not load\. Fetch it again\.$"):
            await mode(make_part(make_project(RUN)), asyncio.Event(), outside(gateway, FakeBackend(before=broken)))
        assert gateway.log[-1] == "clear_models"


async def continued(project: Project, mode: Callable[..., Awaitable[None]]) -> None:
    await mode(make_part(project), asyncio.Event(), outside(FakeGateway(), FakeBackend(before=broken)))


@pytest.mark.parametrize("mode", [train, evaluate, serve])
async def test_a_checkpoint_that_does_not_load_is_no_fault_of_the_configuration(mode: Any) -> None:
    await run_trainer(make_project(RUN, {"train.steps": "1"}), FakeGateway())
    with pytest.raises(TrainerError, match="The model does not load"):
        await continued(make_project(RUN), mode)


async def test_a_policy_that_the_user_named_is_a_fault_of_the_configuration() -> None:
    project = make_project(RUN)
    await run_trainer(make_project(RUN, {"train.steps": "1"}), FakeGateway())
    backend = FakeBackend(before=broken)
    with pytest.raises(ConfigError, match="The model does not load"):
        await evaluate(
            make_part(project), asyncio.Event(), outside(FakeGateway(), backend), policy=project.root / "base"
        )


@pytest.mark.parametrize("mode", [train, evaluate, serve])
async def test_a_stop_ends_the_wait_for_a_gateway_that_never_announces_itself(mode: Any) -> None:
    stop = asyncio.Event()

    async def connect(part: Part) -> Any:
        stop.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(20):
        with pytest.raises(Stopped):
            await mode(make_part(make_project(RUN)), stop, Outside(lambda config, policy: FakeBackend(), connect))
