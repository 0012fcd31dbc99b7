"""A batch of verl's that takes exactly `train.mini_batches` optimizer steps an epoch, whatever number of rows it has.

verl cuts rows, padded to a multiple of the mini-batch, in their order; so the batch is padded here already, by verl's
own padding rows, and ordered so that every mini-batch has its share of the rows with a gradient. As in the embedded
backend there are fewer mini-batches where fewer rollouts can give a gradient.
"""

from __future__ import annotations

from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size

from agl_runtime.trainer.backends.verl.rows import mini_batch_rows, spread_rows

_PAD_ID = 0


def into_mini_batches(batch: KVBatchMeta, config: Any, mini_batches: int, dp: int) -> KVBatchMeta:
    """The batch to train on `dp` ranks. Sets in `config`, verl's own, what its trainer and agl's estimators read."""
    group_size = config.actor_rollout_ref.rollout.n
    trained = {key.rsplit("_", 1)[0] for key, tag in zip(batch.keys, batch.tags, strict=True) if tag["trained_tokens"]}
    count = max(1, min(mini_batches, len(trained)))
    size = mini_batch_rows(len(batch.keys), group_size, count, dp)
    config.actor_rollout_ref.actor.ppo_mini_batch_size = size
    config.algorithm.agl.mini_batches = count
    batch = upsample_batch_to_divisible_size(batch, size * group_size * count, _PAD_ID)
    batch.reorder(spread_rows([tag["trained_tokens"] > 0 and not tag["is_padding"] for tag in batch.tags], count))
    return batch
