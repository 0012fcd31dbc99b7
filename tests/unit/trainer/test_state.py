from __future__ import annotations

from pathlib import Path

import pytest

from agl_runtime.errors import ConfigError, PreconditionError, TrainerError
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer import state
from agl_runtime.trainer.schedule import Group, State

HERE = Path(".agl")


@pytest.fixture(autouse=True)
def _folder() -> None:
    HERE.mkdir()


def save(version: str, run_id: str = "r1", step: int = 1, consumed: tuple[str, ...] = ()) -> Path:
    parsed = PolicyVersion.parse(version)
    at = State(step=step, version=parsed, next_group=step * 2, open=(Group(7, PolicyVersion(1, 1)),))
    folder = state.checkpoint_folder(HERE, parsed)
    folder.mkdir(parents=True)
    saved = state.SavedState.of(run_id, parsed.epoch, at, list(consumed), {"step": step})
    (folder / "state.json").write_text(saved.model_dump_json())
    return folder


def test_a_run_epoch_is_never_given_out_twice() -> None:
    assert [state.next_epoch(HERE) for _ in range(3)] == [1, 2, 3]


def test_a_lost_run_file_does_not_bring_back_the_epochs_of_its_checkpoints() -> None:
    save("4.2")
    assert state.next_epoch(HERE) == 5


def test_a_broken_run_file_is_named() -> None:
    (HERE / "run.json").write_text("{")
    with pytest.raises(TrainerError, match=r"run\.json is broken\. Move the folder \.agl aside"):
        state.next_epoch(HERE)


def test_the_same_run_is_continued_whatever_epochs_passed() -> None:
    run = state.open_run(HERE, "model", 0)
    state.next_epoch(HERE)
    assert state.open_run(HERE, "model", 0) == run


def test_a_run_without_a_checkpoint_gives_way_to_one_with_another_policy_or_seed() -> None:
    run = state.open_run(HERE, "model", 0)
    assert state.open_run(HERE, "other", 0).run_id != run.run_id


@pytest.mark.parametrize(("policy", "seed"), [("other", 0), ("model", 1)])
def test_a_run_with_checkpoints_is_not_continued_from_another_policy_or_seed(policy: str, seed: int) -> None:
    run = state.open_run(HERE, "model", 0)
    save("1.1", run.run_id)
    with pytest.raises(ConfigError, match=f"Run {run.run_id} began with model.path model and train.seed 0.*aside"):
        state.open_run(HERE, policy, seed)


def test_a_run_that_ended_without_signal_is_followed_by_a_new_one() -> None:
    run = state.open_run(HERE, "model", 0)
    state.close_run(HERE, run, "no_signal", 2)
    assert state.open_run(HERE, "model", 0).run_id != run.run_id


def test_how_a_run_ended_is_kept() -> None:
    run = state.open_run(HERE, "model", 0)
    state.close_run(HERE, run, "complete", 5)
    assert state.open_run(HERE, "model", 0) == run.model_copy(update={"ended": "complete", "steps": 5})


def test_a_checkpoint_gives_back_the_state_that_was_saved() -> None:
    folder = save("2.3", step=3, consumed=("a", "b"))
    found = state.newest_checkpoint(HERE)
    assert found is not None
    at = found.saved.schedule_state(validated=0)
    assert (at.step, at.version, at.next_group, at.validated) == (3, PolicyVersion(2, 3), 6, 0)
    assert at.open == (Group(7, PolicyVersion(1, 1)),)
    assert at.saved == at.version
    record = found.saved.record(folder)
    assert (record.rollout_ids, record.path, record.step, record.version) == (["a", "b"], str(folder), 3, "2.3")


def test_the_newest_checkpoint_is_the_last_of_the_last_run_epoch() -> None:
    for version in ("1.9", "1.10", "2.10", "2.11"):
        save(version)
    save("3.1", run_id="another")
    newest = state.newest_checkpoint(HERE, "r1")
    assert newest is not None
    assert newest.version == PolicyVersion(2, 11)


def test_a_folder_that_is_no_whole_checkpoint_is_passed_over() -> None:
    save("1.1")
    (save("1.2") / "state.json").write_text("{")
    save("1.3").rename(HERE / "checkpoints" / "1.3.new")
    save("1.5").rename(HERE / "checkpoints" / ".1.5.partial")
    (HERE / "checkpoints" / "1.4").mkdir()
    assert [item.folder.name for item in state.checkpoints(HERE)] == ["1.1"]


def test_only_the_newest_of_the_run_are_kept() -> None:
    for version in ("1.1", "1.2", "2.3"):
        save(version)
    other = save("1.5", run_id="another")
    state.prune_checkpoints(HERE, "r1", keep=2)
    assert [item.folder.name for item in state.checkpoints(HERE)] == ["1.2", "1.5", "2.3"]
    assert not (HERE / "checkpoints" / "1.1").exists()
    assert other.exists()


def test_a_second_trainer_of_the_project_is_refused() -> None:
    with (
        state.exclusive(HERE),
        pytest.raises(PreconditionError, match="Another trainer runs"),
        state.exclusive(HERE, patience_s=0.0),
    ):
        pass
    with state.exclusive(HERE, patience_s=0.0):
        pass


def test_a_folder_gets_its_place_when_it_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "1.1"
    with state.placing(folder) as partial:
        (partial / "state.json").write_text("{}")
        assert not folder.exists()
    assert (folder / "state.json").read_text() == "{}"
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_that_could_not_be_filled_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "1.1"

    def fill() -> None:
        with state.placing(folder) as partial:
            (partial / "state.json").write_text("{}")
            raise OSError("no space")

    with pytest.raises(TrainerError, match="cannot be written, with"):
        fill()
    assert list(folder.parent.iterdir()) == []


def test_a_folder_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="exists already"), state.placing(tmp_path):
        pass
