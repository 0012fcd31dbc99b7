from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agl_runtime.config import TrainConfig
from agl_runtime.errors import TrainerError
from agl_runtime.trainer.backends.embedded.checkpoint import read_updates, restore, save_checkpoint
from agl_runtime.trainer.backends.embedded.policy import Policy, load_policy
from agl_runtime.trainer.backends.embedded.update import Updater
from fakes.scored import scored_rollouts, totals_of

CONFIG = TrainConfig(lr=1e-3, mini_batches=2)
Load = Callable[[], Policy]


def trained(policy: Policy) -> Updater:
    updater = Updater(policy, CONFIG)
    rollouts = scored_rollouts(policy.model, seed=1)
    updater.run(rollouts, totals_of(rollouts), 0)
    return updater


@pytest.fixture
def saved(fresh_policy: Load, tmp_path: Path) -> Path:
    policy = fresh_policy()
    folder = tmp_path / "checkpoints" / "1.1"
    folder.parent.mkdir()
    save_checkpoint(folder, policy, trained(policy).optimizer, random.Random(5), {"updates": 1, "mine": [1, 2]})
    return folder


def test_the_next_update_after_a_resume_has_the_same_bits(fresh_policy: Load, tmp_path: Path) -> None:
    policy = fresh_policy()
    updater, seeds = trained(policy), random.Random(5)
    seeds.random()
    save_checkpoint(tmp_path / "c", policy, updater.optimizer, seeds, {"updates": 1})
    drawn = torch.rand(3), seeds.random()

    resumed = load_policy(tmp_path / "c")
    again, other_seeds = Updater(resumed, CONFIG), random.Random(99)
    restore(tmp_path / "c", again.optimizer, other_seeds)
    assert (torch.rand(3).tolist(), other_seeds.random()) == (drawn[0].tolist(), drawn[1])

    for one, other in ((policy, updater), (resumed, again)):
        rollouts = scored_rollouts(one.model, seed=2, updates=1)
        other.run(rollouts, totals_of(rollouts), 1)
    for mine, theirs in zip(policy.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_checkpoint_is_an_ordinary_hugging_face_folder_with_the_trainers_state(saved: Path) -> None:
    AutoModelForCausalLM.from_pretrained(saved)
    assert AutoTokenizer.from_pretrained(saved).chat_template
    assert json.loads((saved / "state.json").read_text()) == {"updates": 1, "mine": [1, 2]}
    assert read_updates(saved) == 1


def test_nothing_but_the_checkpoint_remains(saved: Path) -> None:
    assert [path.name for path in saved.parent.iterdir()] == ["1.1"]


def test_what_an_interrupted_save_left_is_replaced(fresh_policy: Load, tmp_path: Path) -> None:
    left = tmp_path / ".c.partial"
    left.mkdir()
    (left / "half.safetensors").write_bytes(b"half")
    policy = fresh_policy()
    save_checkpoint(tmp_path / "c", policy, Updater(policy, CONFIG).optimizer, random.Random(0), {"updates": 0})
    assert not left.exists()
    assert not (tmp_path / "c" / "half.safetensors").exists()


def test_a_save_onto_a_full_disk_leaves_nothing(
    fresh_policy: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(_: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", save)
    policy, parent = fresh_policy(), tmp_path / "checkpoints"
    with pytest.raises(
        TrainerError, match=r"The checkpoint .*/c cannot be written, with .* MiB free there: .*No space"
    ):
        save_checkpoint(parent / "c", policy, Updater(policy, CONFIG).optimizer, random.Random(0), {"updates": 0})
    assert list(parent.iterdir()) == []


def test_an_existing_checkpoint_is_never_overwritten(fresh_policy: Load, saved: Path) -> None:
    policy = fresh_policy()
    with pytest.raises(TrainerError, match="exists already"):
        save_checkpoint(saved, policy, Updater(policy, CONFIG).optimizer, random.Random(0), {"updates": 0})
    assert read_updates(saved) == 1


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


@pytest.mark.parametrize("damage", [Path.unlink, cut, lambda file: file.write_bytes(b"garbage")])
def test_a_broken_trainer_file_is_named(fresh_policy: Load, saved: Path, damage: Callable[[Path], object]) -> None:
    damage(saved / "trainer.pt")
    with pytest.raises(TrainerError, match=r"file .*1\.1/trainer\.pt cannot be read: .*Set train\.backend back if"):
        restore(saved, Updater(fresh_policy(), CONFIG).optimizer, random.Random(0))


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"updates": null}'])
def test_a_broken_state_file_is_named(saved: Path, content: str | None) -> None:
    (saved / "state.json").unlink()
    if content is not None:
        (saved / "state.json").write_text(content)
    with pytest.raises(TrainerError, match=r"The checkpoint file .*1\.1/state\.json cannot be read"):
        read_updates(saved)


def test_a_resumed_optimizer_takes_the_present_learning_rate(fresh_policy: Load, saved: Path) -> None:
    optimizer = Updater(fresh_policy(), TrainConfig(lr=5e-4, weight_decay=0.1)).optimizer
    restore(saved, optimizer, random.Random(0))
    [group] = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (5e-4, 0.1)
    assert len(optimizer.state) == len(group["params"])


def test_an_optimizer_of_another_model_is_refused(saved: Path) -> None:
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    with pytest.raises(TrainerError, match=r"trainer\.pt cannot be read"):
        restore(saved, optimizer, random.Random(0))
