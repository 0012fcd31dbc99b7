"""The project's tasks as verl reads data: the place of a row is the number of its group in the run's order.

`data.train_files` and `data.val_files` are `train:<setup file>` and `val:<setup file>`. Rows hold no text: what an
agent is given is read from the task when its group is enqueued.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from agl_runtime.trainer.backends.verl.setup import Setup
from agl_runtime.trainer.checks import validation_tasks

ENDLESS = 2**31
"""Rows of the training data: its order goes through the tasks again and again, each time shuffled anew."""


class TaskDataset(Dataset[dict[str, Any]]):
    """verl's keyword arguments beyond `data_files` change nothing here."""

    def __init__(self, data_files: str, **_more: Any) -> None:
        split, _, file = data_files.partition(":")
        # verl makes a loader for the validation tasks also where there are none, and wants it not to be empty.
        self._size = ENDLESS if split == "train" else max(1, len(validation_tasks(Setup.read(file).project)))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"raw_prompt": "", "index": index, "data_source": "agl"}
