from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.config import load_project
from agl_runtime.schemas import Model
from agl_runtime.trainer.backends.verl.follow import Follower
from agl_runtime.trainer.backends.verl.records import GroupRecord
from agl_runtime.trainer.backends.verl.setup import Setup
from agl_runtime.trainer.metrics import MetricsLog
from agl_runtime.trainer.progress import Progress
from fakes.projects import make_project
from fakes.trained import make_ended, make_samples


class Run:
    def __init__(self, root: Path) -> None:
        make_project(root, {"train": {"backend": "verl", "groups_per_step": 1}})
        config = load_project(root).config.model_dump(mode="json")
        self.setup = Setup(root=root, config=config, run_id="r1", run_epoch=2, step=4, version="1.4")
        self.setup.write()
        self.metrics = MetricsLog(root / "metrics.jsonl", "r1")
        self.progress = Progress()
        self.figures = root / "figures.jsonl"
        self.follower = Follower(self.setup, self.metrics, self.progress, self.figures)

    def group(self, uid: str, *rewards: float | None) -> None:
        ended = [make_ended(f"{uid}-{i}", reward) for i, reward in enumerate(rewards)]
        built = [make_samples(item.rollout_id, 2) for item in ended]
        self.setup.tell("group", **GroupRecord.of(uid, 0, "1.4", ended, built).event())

    def verl_logs(self, step: int, **data: float) -> None:
        with self.figures.open("a") as file:
            file.write(json.dumps({"step": step, "data": data}) + "\n")

    def lines(self) -> list[dict[str, Any]]:
        self.follower.catch_up()
        return self.metrics.lines


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_step_is_told_once_batch_and_verls_figures_are_there(run: Run) -> None:
    run.group("a", 1.0, 0.0, None)
    run.setup.tell("batch", step=5, uids=["a"], staleness=[1], dropped=2)
    assert run.lines() == []
    run.verl_logs(
        5, **{"timing_s/gen": 3.0, "timing_s/step": 5.0, "timing_s/save_checkpoint": 0.5, "actor/grad_norm": 0.25}
    )
    (line,) = run.lines()
    assert line["step"] == 5
    assert line["version"] == "2.5"
    assert (line["reward_mean"], line["scored"], line["failed"], line["samples"]) == (0.5, 2, 1, 4)
    assert (line["staleness_max"], line["groups_dropped"], line["grad_norm"]) == (1, 2, 0.25)
    assert (line["sample_s"], line["hold_s"], line["update_s"], line["save_s"]) == (3.0, 2.0, 1.5, 0.5)
    assert line["logprob_gap"] is None  # no token was fresh


def test_a_group_of_an_earlier_process_counts_in_the_batch_that_takes_it(run: Run) -> None:
    earlier = Run.__new__(Run)
    earlier.setup = run.setup.model_copy(update={"run_epoch": 1})
    earlier.group("old", 1.0, 0.0)
    earlier.setup.tell("batch", step=5, uids=["old"], staleness=[0], dropped=0)  # lost with that process
    run.verl_logs(5)
    assert run.lines() == []
    run.setup.tell("batch", step=5, uids=["old"], staleness=[3], dropped=0)
    run.verl_logs(5)
    assert [line["staleness_max"] for line in run.lines()] == [3]


def test_a_validation_without_rewards_is_no_line(run: Run) -> None:
    run.setup.tell("validating", step=4, rollouts=6)
    run.follower.catch_up()
    assert run.progress.status().waiting_for == "6 of 6 rollouts"
    run.setup.tell("validation", step=4, line=None)
    assert run.lines() == []


def test_rollouts_of_skipped_batches_are_kept_for_the_diagnosis(run: Run) -> None:
    run.group("flat", 0.0, 0.0)
    run.setup.tell("skipped", uids=["flat"])
    run.follower.catch_up()
    assert [item.reward for item in run.follower.unlearnt] == [0.0, 0.0]


async def test_a_gateway_that_began_anew_is_told_the_servers_but_not_while_weights_change(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_VERL_SERVER_KEY", "the-key")
    registered: list[Model] = []

    class Gateway:
        async def register_model(self, model: Model) -> None:
            registered.append(model)

    model = Model(model="policy", endpoint="http://127.0.0.1:1/v1", version=4, run_epoch=2)
    run.setup.tell("serving", step=4, models=[model.model_dump(mode="json")])
    run.follower.catch_up()
    await run.follower.announce(Gateway())  # type: ignore[arg-type]
    assert [(item.endpoint, item.version) for item in registered] == [("http://127.0.0.1:1/v1", 4)]
    assert registered[0].api_key is not None
    assert registered[0].api_key.get_secret_value() == "the-key"
    run.setup.tell("held")
    run.follower.catch_up()
    await run.follower.announce(Gateway())  # type: ignore[arg-type]
    assert len(registered) == 1
