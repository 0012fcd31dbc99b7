"""A batch of verl's that takes exactly `train.mini_batches` optimizer steps an epoch, whatever number of rows it has.

verl cuts rows, padded to a multiple of the mini-batch, in their order; so the batch is padded here already, by verl's
own padding rows, and ordered so that every mini-batch has its share of the rows with a gradient.
"""

from __future__ import annotations

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

from agl_runtime.trainer.backends.verl.rows import mini_batch_rows, spread_rows

_PAD_ID = 0


def into_mini_batches(batch: KVBatchMeta, group_size: int, mini_batches: int, dp: int) -> tuple[KVBatchMeta, int]:
    """The batch to train on, and verl's `ppo_mini_batch_size` for it."""
    size = mini_batch_rows(len(batch.keys), group_size, mini_batches, dp)
    batch = upsample_batch_to_divisible_size(batch, size * group_size * mini_batches, _PAD_ID)
    trains = [tag["trained_tokens"] > 0 and not tag["is_padding"] for tag in batch.tags]
    batch.reorder(spread_rows(trains, mini_batches))
    return batch, size
