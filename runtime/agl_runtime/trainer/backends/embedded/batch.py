"""Rows that are decoded together, with one key/value cache.

Every row's newest token stands in the last column; shorter rows have masked columns on their left, so a position in the
cache means the same distance from the end in every row and any attention mask of transformers works unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from agl_runtime.trainer.backends.embedded.policy import Policy


class Batch:
    """`size` rows and what the model has computed for them.

    `logits` [rows, vocabulary] follow each row's last token.
    """

    def __init__(self, policy: Policy, size: int) -> None:
        self._policy = policy
        self._cache = DynamicCache()
        self._mask = torch.zeros(size, 0, dtype=torch.long, device=policy.device)
        self._lengths = torch.zeros(size, dtype=torch.long, device=policy.device)
        self.logits = torch.empty(size, 0)

    def forward(self, ids: Tensor, valid: Tensor) -> None:
        """Append columns: `ids` [rows, new] of which those with `valid` 1 are real."""
        self._mask = torch.cat([self._mask, valid], dim=1)
        positions = (self._lengths[:, None] + valid.cumsum(1) - 1).clamp(min=0)
        self._lengths = self._lengths + valid.sum(1)
        self.logits = self._policy.logits(ids, self._mask, positions, cache=self._cache, last=True)

    def decode(self, ids: Sequence[int]) -> None:
        """Append one token to every row."""
        column = torch.tensor(ids, device=self._policy.device)[:, None]
        self.forward(column, torch.ones_like(column))

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows, and the columns that only they needed."""
        index = torch.tensor(rows, dtype=torch.long, device=self._policy.device)
        mask = self._mask[index]
        unused = int((mask.cumsum(1).amax(0) == 0).sum()) if len(rows) else mask.shape[1]
        self._mask, self._lengths = mask[:, unused:], self._lengths[index]
        self.logits = self.logits[index]
        for layer in self._layers():
            layer.keys, layer.values = (part[index, :, unused:] for part in _parts(layer))

    def join(self, other: Batch) -> None:
        """Append the rows of `other`, which is used up."""
        width = max(self._mask.shape[1], other._mask.shape[1])
        self._mask = torch.cat([pad(m, (width - m.shape[1], 0)) for m in (self._mask, other._mask)])
        self._lengths = torch.cat([self._lengths, other._lengths])
        self.logits = torch.cat([self.logits, other.logits])
        for mine, theirs in zip(self._layers(), other._layers(), strict=True):
            mine.keys, mine.values = (
                torch.cat([pad(part, (0, 0, width - part.shape[2], 0)) for part in both])
                for both in zip(_parts(mine), _parts(theirs), strict=True)
            )

    def _layers(self) -> list[DynamicLayer]:
        """Those that hold keys and values of their own; some models share them between layers."""
        return [layer for layer in self._cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]


def _parts(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    """Keys and values, [rows, heads, columns, size]."""
    return cast(Tensor, layer.keys), cast(Tensor, layer.values)


class Prefill:
    """A new `Batch` that reads its prompts a bounded number of tokens at a time."""

    def __init__(self, policy: Policy, prompts: Sequence[Sequence[int]]) -> None:
        width = max(len(prompt) for prompt in prompts)
        self._ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=policy.device)
        self._valid = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=policy.device)
        self._done = 0
        self.batch = Batch(policy, len(prompts))

    def advance(self, most_tokens: int) -> bool:
        """Read up to `most_tokens` (padding included, at least a column); True when all is read."""
        end = self._done + max(1, most_tokens // self._ids.shape[0])
        self.batch.forward(self._ids[:, self._done : end], self._valid[:, self._done : end])
        self._done = end
        return end >= self._ids.shape[1]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        index = torch.tensor(rows, dtype=torch.long, device=self._ids.device)
        self._ids, self._valid = self._ids[index], self._valid[index]
        self.batch.keep(rows)
