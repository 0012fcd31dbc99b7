from __future__ import annotations

import stat
from pathlib import Path

import pytest

from agl_runtime.config import load_project
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.verl.setup import Ending, RunEnded, Setup
from fakes.projects import make_project


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    make_project(tmp_path, {"train": {"backend": "verl"}})
    project = load_project(tmp_path)
    config = project.config.model_dump(mode="json")
    made = Setup(root=tmp_path, config=config, run_id="r1", run_epoch=3, step=5, version="2.5", open=[(9, "2.4")])
    made.write()
    return made


def test_whoever_reads_the_file_has_the_same_project(setup: Setup) -> None:
    again = Setup.read(setup.write())
    assert again == setup
    assert again.project.config == load_project(setup.root).config


def test_only_its_owner_can_read_it(setup: Setup) -> None:
    assert stat.S_IMODE(setup.write().stat().st_mode) == 0o600


def test_weights_are_named_by_the_epoch_that_made_them(setup: Setup) -> None:
    assert setup.weights(5) == PolicyVersion(2, 5)
    assert setup.weights(6) == PolicyVersion(3, 6)


def test_events_are_read_once_and_only_when_whole(setup: Setup) -> None:
    lines = setup.events()
    assert list(lines.fresh()) == []
    setup.tell("held")
    file = setup.folder / "events.jsonl"
    with file.open("a") as handle:
        handle.write('{"kind": "bat')
    assert [event["kind"] for event in lines.fresh()] == ["held"]
    with file.open("a") as handle:
        handle.write('ch"}\n')
    assert [event["kind"] for event in lines.fresh()] == ["batch"]


def test_an_event_that_a_full_disk_cut_off_takes_no_other_with_it(setup: Setup) -> None:
    setup.tell("held")
    with (setup.folder / "events.jsonl").open("a") as handle:
        handle.write('{"kind": "bat')
    setup.tell("saved", step=6)
    assert [event["kind"] for event in setup.events().fresh()] == ["held", "saved"]


def test_the_first_reason_to_end_counts(setup: Setup) -> None:
    assert setup.ending() is None
    setup.ask_to_end(Ending(kind="stopped"))
    with pytest.raises(RunEnded):
        setup.end(Ending(kind="failed", what="Too late.", fix="-"))
    assert setup.ending() == Ending(kind="stopped")


def test_another_run_epoch_is_not_ended_by_an_older_ones_reason(setup: Setup) -> None:
    setup.ask_to_end(Ending(kind="stopped"))
    assert setup.model_copy(update={"run_epoch": 4}).ending() is None
