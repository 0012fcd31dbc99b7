"""Generations that are decoded together, with one key/value cache.

Every row's newest token stands in the last column; shorter rows have masked columns on their left, so a position in the
cache means the same distance from the end in every row and any attention mask of transformers works unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from agl_runtime.trainer.backends.embedded.generation import Generation
from agl_runtime.trainer.backends.embedded.policy import Policy


class Batch:
    """`read` first, until all that `rows` hold so far has been read; from then on `logits` [rows, vocabulary] follow
    each row's last token."""

    def __init__(self, policy: Policy, rows: Sequence[Generation]) -> None:
        self.rows = list(rows)
        self._policy = policy
        self._cache = DynamicCache()
        tokens = [[*row.prompt, *row.ids] for row in rows]
        width = max(map(len, tokens), default=0)
        self._unread = self._columns([[0] * (width - len(ids)) + ids for ids in tokens])
        self._valid = self._columns([[0] * (width - len(ids)) + [1] * len(ids) for ids in tokens])
        self._mask = self._valid[:, :0]
        self._lengths = self._mask.sum(1)
        self.logits = torch.empty(len(rows), 0)

    def read(self, most_tokens: int) -> bool:
        """Read up to `most_tokens` (padding included, but at least a column); True when nothing is left."""
        columns = max(1, most_tokens // len(self.rows))
        ids, valid = self._unread[:, :columns], self._valid[:, :columns]
        self._unread, self._valid = self._unread[:, columns:], self._valid[:, columns:]
        self._forward(ids, valid)
        return not self._unread.shape[1]

    def decode(self) -> None:
        """Read the token that each row has just got."""
        ids = self._columns([[row.tokens[-1].id] for row in self.rows])
        self._forward(ids, torch.ones_like(ids))

    def keep(self, wanted: Callable[[Generation], bool]) -> None:
        """Drop all other rows, and the columns that only they needed."""
        kept = [i for i, row in enumerate(self.rows) if wanted(row)]
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in kept]
        index = torch.tensor(kept, dtype=torch.long, device=self._policy.device)
        self._unread, self._valid, self.logits = self._unread[index], self._valid[index], self.logits[index]
        self._mask, self._lengths = self._mask[index], self._lengths[index]
        unused = int((self._mask.cumsum(1) == 0).all(0).sum())
        self._mask = self._mask[:, unused:]
        for layer in self._layers():
            layer.keys, layer.values = (part[index, :, unused:] for part in _parts(layer))

    def joined(self, other: Batch) -> Batch:
        """The rows of both, which are used up. All must have been read."""
        if not self.rows:
            return other
        width = max(self._mask.shape[1], other._mask.shape[1])
        self.rows += other.rows
        self._mask = torch.cat([pad(m, (width - m.shape[1], 0)) for m in (self._mask, other._mask)])
        self._unread = self._valid = self._mask[:, :0]
        self._lengths = torch.cat([self._lengths, other._lengths])
        self.logits = torch.cat([self.logits, other.logits])
        for mine, theirs in zip(self._layers(), other._layers(), strict=True):
            mine.keys, mine.values = (
                torch.cat([pad(part, (0, 0, width - part.shape[2], 0)) for part in both])
                for both in zip(_parts(mine), _parts(theirs), strict=True)
            )
        return self

    def _forward(self, ids: Tensor, valid: Tensor) -> None:
        """Append columns [rows, new], of which those with `valid` 1 are real."""
        self._mask = torch.cat([self._mask, valid], dim=1)
        positions = (self._lengths[:, None] + valid.cumsum(1) - 1).clamp(min=0)
        self._lengths = self._lengths + valid.sum(1)
        self.logits = self._policy.logits(ids, self._mask, positions, cache=self._cache, columns=1)[:, -1].float()

    def _columns(self, values: list[list[int]]) -> Tensor:
        width = len(values[0]) if values else 0
        return torch.tensor(values, dtype=torch.long, device=self._policy.device).view(len(values), width)

    def _layers(self) -> list[DynamicLayer]:
        """Those that hold keys and values of their own; some models share them between layers."""
        return [layer for layer in self._cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]


def _parts(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    """Keys and values, [rows, heads, columns, size]."""
    return cast(Tensor, layer.keys), cast(Tensor, layer.values)
