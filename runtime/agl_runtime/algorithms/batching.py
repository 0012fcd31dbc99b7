"""From samples to the rows of an update, cut into mini-batches and micro-batches, and on to tensors.

    rows = train_rows(rollouts, totals, normalization)        once an update: weights over the whole batch
    for mini in mini_batches(rows, count):                    one optimizer step each
        for micro in micro_batches(mini, token_budget):       gradients add up
            batch = to_tensors(micro, pad_id, device)

Invariants: every row with a trained token is in exactly one mini-batch and one micro-batch; rollouts are never cut
apart by mini-batches; nothing is dropped or repeated to make numbers divide; the same input gives the same cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_runtime.algorithms.weights import Normalization, Totals, row_weights


class Row(Protocol):
    """A sample: arrays of one length, see `samples.types.Sample`."""

    @property
    def ids(self) -> NDArray[np.int32]: ...
    @property
    def mask(self) -> NDArray[np.bool_]: ...
    @property
    def logprobs(self) -> NDArray[np.float32]: ...
    @property
    def updates(self) -> NDArray[np.int32]: ...


class Rows(Protocol):
    @property
    def samples(self) -> Sequence[Row]: ...


class Scored(Protocol):
    """A rollout with its advantage and its samples."""

    @property
    def advantage(self) -> float: ...
    @property
    def samples(self) -> Rows: ...


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A sample with what the loss needs: index of its rollout, advantage, and weight of each of its trained tokens."""

    row: Row
    rollout: int
    advantage: float
    weight: float

    @property
    def length(self) -> int:
        return int(self.row.ids.size)


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """A micro-batch of N rows padded on the right to T tokens, with M trained tokens, row by row.

    `ids` [N, T] int64, `attention` [N, T] bool (True on real tokens). `position` [M] int64 finds, in anything of shape
    [N, T, ...] flattened to [N * T, ...], the outputs that predict the trained tokens (each one place before its
    token); `select` does it. Of each trained token: `targets` [M] int64 its id, `recorded` [M] float32 its recorded
    log-probability, `updates` [M] int32 the number of updates of the weights that sampled it, `advantages` and
    `weights` [M] float32.
    """

    ids: Tensor
    attention: Tensor
    position: Tensor
    targets: Tensor
    recorded: Tensor
    updates: Tensor
    advantages: Tensor
    weights: Tensor

    @property
    def columns(self) -> int:
        """In so many last columns of T stand all outputs that predict the targets; a prompt's need no computing."""
        width = self.ids.shape[1]
        return width - int((self.position % width).min())

    def select(self, outputs: Tensor) -> Tensor:
        """Of `outputs` [N, C, ...] of the model (logits, hidden states), those of the last C columns, the ones that
        predict the targets: [M, ...]. C is at least `columns`."""
        width, given = self.ids.shape[1], outputs.shape[1]
        row, column = self.position // width, self.position % width
        return outputs.flatten(0, 1).index_select(0, row * given + column - (width - given))


def train_rows(rollouts: Sequence[Scored], totals: Totals, normalization: Normalization) -> list[TrainRow]:
    """The rows of an update. `totals` counts the whole batch, `rollouts` may leave out those without a gradient."""
    trained = [[int(np.count_nonzero(row.mask)) for row in rollout.samples.samples] for rollout in rollouts]
    weights = row_weights(trained, totals, normalization)
    return [
        TrainRow(row, index, rollout.advantage, weight)
        for index, rollout in enumerate(rollouts)
        for row, weight, tokens in zip(rollout.samples.samples, weights[index], trained[index], strict=True)
        if tokens
    ]


def mini_batches(rows: Sequence[TrainRow], count: int) -> list[list[TrainRow]]:
    """Cut into `count` mini-batches of whole rollouts (fewer when there are fewer rollouts), whose numbers of rollouts
    differ by at most one and whose tokens are balanced.

    Weights are multiplied by the number of mini-batches and by nothing that depends on the cut: a rollout counts the
    same in whichever mini-batch it falls, and the mean of the mini-batches' gradients is the gradient of the whole.
    """
    by_rollout: dict[int, list[TrainRow]] = {}
    for row in rows:
        by_rollout.setdefault(row.rollout, []).append(row)
    count = min(count, len(by_rollout))
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    size = {rollout: sum(row.length for row in group) for rollout, group in by_rollout.items()}
    # Longest first into the emptiest bin; filling the bins in rounds keeps their numbers of rollouts equal.
    for place, rollout in enumerate(sorted(by_rollout, key=lambda r: (-size[r], r))):
        open_bins = [b for b in range(count) if len(bins[b]) == place // count]
        chosen = min(open_bins, key=lambda b: (tokens[b], b))
        bins[chosen].append(rollout)
        tokens[chosen] += size[rollout]
    return [
        [replace(row, weight=row.weight * count) for rollout in sorted(members) for row in by_rollout[rollout]]
        for members in bins
    ]


def micro_batches(rows: Sequence[TrainRow], token_budget: int) -> list[list[TrainRow]]:
    """Pack rows so that rows times longest row, padding counted, stays within `token_budget`; a row longer than the
    budget is alone. Rows of like length go together, longest first."""
    packed: list[list[TrainRow]] = []
    for row in sorted(rows, key=lambda row: -row.length):
        if packed and (len(packed[-1]) + 1) * packed[-1][0].length <= token_budget:
            packed[-1].append(row)
        else:
            packed.append([row])
    return packed


def pad_rows(rows: Sequence[TrainRow], multiple: int) -> list[TrainRow]:
    """`rows` and as many copies of the shortest, with weight 0, as make their number a multiple of `multiple`. For
    engines that only take such numbers: the copies change neither loss nor gradient."""
    missing = -len(rows) % multiple
    filler = [replace(min(rows, key=lambda row: row.length), weight=0.0)] * missing if missing else []
    return [*rows, *filler]


def to_tensors(rows: Sequence[TrainRow], pad_id: int, device: torch.device | str = "cpu") -> TensorBatch:
    """Pad one micro-batch and move it to `device`. Padding is `pad_id` with attention False."""
    lengths = np.array([row.length for row in rows])
    width = int(lengths.max())
    ids = np.full((len(rows), width), pad_id, np.int64)
    attention = np.arange(width) < lengths[:, None]
    ids[attention] = _joined([row.row.ids for row in rows])
    masks = [row.row.mask for row in rows]
    trained = np.zeros(ids.shape, np.bool_)
    trained[attention] = _joined(masks)
    counts = trained.sum(axis=1)

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return TensorBatch(
        ids=tensor(ids),
        attention=tensor(attention),
        position=tensor(np.flatnonzero(trained) - 1),
        targets=tensor(ids[trained]),
        recorded=tensor(_joined([row.row.logprobs[mask] for row, mask in zip(rows, masks, strict=True)])),
        updates=tensor(_joined([row.row.updates[mask] for row, mask in zip(rows, masks, strict=True)])),
        advantages=tensor(np.repeat(np.array([row.advantage for row in rows], np.float32), counts)),
        weights=tensor(np.repeat(np.array([row.weight for row in rows], np.float32), counts)),
    )


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(arrays)
