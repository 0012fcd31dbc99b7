from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from agl_runtime.client import GatewayClient
from agl_runtime.config import load_project
from agl_runtime.errors import AglError, ConfigError, GatewayError, PreconditionError, TrainerError
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.verl import launch
from agl_runtime.trainer.backends.verl.follow import Follower
from agl_runtime.trainer.backends.verl.launch import outcome_of, place_trackers
from agl_runtime.trainer.backends.verl.records import GroupRecord
from agl_runtime.trainer.backends.verl.setup import Ending, Setup
from agl_runtime.trainer.metrics import MetricsLog, Outcome
from agl_runtime.trainer.progress import Progress
from agl_runtime.trainer.state import Run
from fakes.gateway import FakeGateway
from fakes.projects import make_project
from fakes.trained import make_ended, make_samples


class RemoteError(RuntimeError):
    """As Ray wraps what is raised in one of its processes."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"ray::run()\n  File ...\n{type(cause).__name__}: {cause}")
        self.cause = cause


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    make_project(tmp_path, {"train": {"backend": "verl", "steps": 7}})
    config = load_project(tmp_path).config.model_dump(mode="json")
    made = Setup(root=tmp_path, config=config, run_id="r1", run_epoch=3, step=2, version="2.2")
    made.write()
    return made


def ended(setup: Setup, error: BaseException | None) -> Outcome:
    follower = Follower(setup, MetricsLog(setup.root / "m", "r1"), Progress(), setup.root / "f")
    follower.catch_up()
    return outcome_of(error, setup, follower)


def test_verls_end_is_the_runs(setup: Setup) -> None:
    setup.tell("saved", step=7)
    assert ended(setup, None) == Outcome("complete", 7, PolicyVersion(3, 7))


def test_a_run_of_which_only_the_last_validation_was_left_ends_with_the_weights_it_had(setup: Setup) -> None:
    assert ended(setup, None) == Outcome("complete", 2, PolicyVersion(2, 2))


def test_a_stop_leaves_the_run_where_the_last_checkpoint_is(setup: Setup) -> None:
    setup.ask_to_end(Ending(kind="stopped"))
    assert ended(setup, RemoteError(RuntimeError("asked"))) == Outcome("stopped", 2, PolicyVersion(2, 2))
    setup.tell("saved", step=4)
    assert ended(setup, RemoteError(RuntimeError("asked"))) == Outcome("stopped", 4, PolicyVersion(3, 4))


def test_a_run_that_could_learn_nothing_says_why(setup: Setup) -> None:
    rollouts = [make_ended(f"a-{i}", 0.0) for i in range(2)]
    record = GroupRecord.of("a", 0, "2.2", rollouts, [make_samples(item.rollout_id) for item in rollouts])
    setup.tell("group", **record.event())
    setup.tell("skipped", uids=["a"])
    setup.ask_to_end(Ending(kind="no_signal"))
    outcome = ended(setup, RemoteError(RuntimeError("asked")))
    assert outcome.ended == "no_signal"
    assert outcome.reason is not None
    assert "Every reward is 0: the tasks are too hard" in outcome.reason


def test_a_run_without_a_token_to_train_says_so(setup: Setup) -> None:
    rollouts = [make_ended(f"a-{i}", float(i)) for i in range(2)]
    record = GroupRecord.of("a", 0, "2.2", rollouts, [make_samples(item.rollout_id, 0) for item in rollouts])
    setup.tell("group", **record.event())
    setup.tell("skipped", uids=["a"])
    setup.ask_to_end(Ending(kind="no_signal"))
    reason = ended(setup, RemoteError(RuntimeError("asked"))).reason
    assert reason is not None
    assert "no model call can be trained on. `agl rollouts show ID` shows" in reason


def test_what_a_piece_of_agl_says_is_passed_on(setup: Setup) -> None:
    setup.ask_to_end(Ending(kind="failed", what="The store is full.", fix="Make room."))
    with pytest.raises(TrainerError) as told:
        ended(setup, RemoteError(RuntimeError("asked")))
    assert (told.value.what, told.value.fix) == ("The store is full.", "Make room.")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("train.verl sets x.", "Correct it."),
        PreconditionError("No verl.", "Install it."),
        RemoteError(GatewayError("No gateway.", "Start it.")),
    ],
)
def test_an_error_of_agls_own_stays_what_it_is(setup: Setup, error: Exception) -> None:
    with pytest.raises(AglError) as told:
        ended(setup, error)
    assert told.value is getattr(error, "cause", error)


def test_an_error_of_verls_is_told_by_its_last_line(setup: Setup) -> None:
    with pytest.raises(TrainerError, match=r"verl failed: ValueError: no such thing\. See `agl logs trainer`"):
        ended(setup, RemoteError(ValueError("no such thing.")))


async def test_a_stop_while_ray_and_verl_start_waits_for_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_project(tmp_path, {"train": {"backend": "verl", "device": "cpu", "steps": 7}})
    began, never, stop = threading.Event(), threading.Event(), asyncio.Event()

    def drive(*_: Mapping[str, Any]) -> None:
        began.set()
        never.wait()

    monkeypatch.setattr(launch, "drive", drive)
    monkeypatch.setattr(os, "environ", {})
    run = Run(run_id="r1", policy="model", seed=0)
    client, metrics = cast(GatewayClient, FakeGateway()), MetricsLog(tmp_path / "m", "r1")
    start = launch.Start(load_project(tmp_path), client, run, 1, None, metrics, Progress())
    training = asyncio.create_task(launch.train(start, stop))
    await asyncio.to_thread(began.wait)
    stop.set()
    try:
        assert await training == Outcome("stopped", 0, PolicyVersion(0, 0))
    finally:
        never.set()


def test_trackers_write_below_agls_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TENSORBOARD_DIR", "WANDB_DIR", "MLFLOW_TRACKING_URI", "SWANLAB_LOG_DIR"):
        monkeypatch.delenv(variable, raising=False)
    told = place_trackers(["console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio"], tmp_path, "r1")
    trackers = tmp_path / "trackers"
    assert told == {
        "TENSORBOARD_DIR": f"{trackers}/tensorboard/r1",
        "WANDB_DIR": f"{trackers}/wandb",
        "MLFLOW_TRACKING_URI": f"sqlite:///{trackers}/mlflow/mlflow.db",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": f"{trackers}/mlflow/artifacts",
        "SWANLAB_LOG_DIR": f"{trackers}/swanlab",
    }
    assert {path.name for path in trackers.iterdir()} == {"tensorboard", "wandb", "mlflow", "swanlab"}


def test_a_tracker_that_the_users_shell_places_is_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    monkeypatch.setenv("WANDB_DIR", "")
    assert place_trackers(["mlflow", "wandb"], tmp_path, "r1") == {"WANDB_DIR": f"{tmp_path}/trackers/wandb"}
    assert not (tmp_path / "trackers" / "mlflow").exists()
