"""Checkpoints: a Hugging Face folder of the policy that also holds what training needs to go on.

    config.json model.safetensors tokenizer.json ...    as transformers writes them
    trainer.pt                                          optimizer, torch's RNG, the stream of sampling seeds
    state.json                                          the trainer's own state

A checkpoint is there whole or not at all, see `state.placing`.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from agl_runtime.errors import TrainerError
from agl_runtime.trainer.backends.embedded.policy import Policy
from agl_runtime.trainer.state import STATE_FILE, placing

TRAINER_FILE = "trainer.pt"
_READ_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError)


def save_checkpoint(
    folder: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    seeds: random.Random,
    state: Mapping[str, Any],
) -> None:
    """Raises TrainerError when the folder exists or cannot be written; nothing of it then remains."""
    with placing(folder) as partial:
        try:
            policy.model.save_pretrained(partial)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        policy.tokenizer.save_pretrained(partial)
        torch.save(
            {"optimizer": optimizer.state_dict(), "torch_rng": _torch_rng(), "seeds": seeds.getstate()},
            partial / TRAINER_FILE,
        )
        (partial / STATE_FILE).write_text(json.dumps(dict(state)), encoding="utf-8")


def read_updates(folder: Path) -> int:
    """The number of updates in a checkpoint's weights. Raises TrainerError that names the file at fault."""
    file = folder / STATE_FILE
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["updates"])
    except _READ_ERRORS as error:
        raise _broken(file, error) from error


def restore(folder: Path, optimizer: torch.optim.Optimizer, seeds: random.Random) -> None:
    """Put the optimizer's state, torch's RNG and the seeds back as they were saved; learning rate and the like stay as
    they are now. Raises TrainerError that names the file."""
    file = folder / TRAINER_FILE
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(saved["optimizer"])
        for group, present in zip(optimizer.param_groups, settings, strict=True):
            group.update(present)
        cpu, *gpus = saved["torch_rng"]
        torch.set_rng_state(cpu)
        if gpus and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(gpus)
        seeds.setstate(saved["seeds"])
    except _READ_ERRORS as error:
        raise _broken(file, error) from error


def _torch_rng() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def _broken(file: Path, error: Exception) -> TrainerError:
    reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    fix = "Set train.backend back if it was changed, or remove this checkpoint to resume from an earlier one."
    return TrainerError(f"The checkpoint file {file} cannot be read: {reason}.", fix)
