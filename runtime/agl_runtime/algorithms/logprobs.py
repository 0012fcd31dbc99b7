"""Log-probabilities and entropy of tokens from logits, in at least float32, by chunks, so that no second copy of the
logits is ever held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24
"""Logits held at once in higher precision: 64 MiB of float32."""


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability in nats of `ids` [...] under softmax(logits / temperature); `logits` [..., V] are those that
    predict `ids`, place by place. The backward pass holds one gradient in the dtype of the logits, and chunks."""
    flat = logits.reshape(-1, logits.shape[-1])
    # torch leaves Function.apply untyped.
    result: Tensor = _TokenLogProbs.apply(flat, ids.reshape(-1), temperature)  # type: ignore[no-untyped-call]
    return result.view(ids.shape)


@torch.no_grad()
def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of softmax(logits / temperature), [..., V] -> [...], without gradient."""
    flat = logits.reshape(-1, logits.shape[-1])
    entropy = torch.empty(len(flat), dtype=_precision(flat), device=flat.device)
    for part in _chunks(flat):
        logs = torch.log_softmax(_scaled(flat[part], temperature), dim=-1)
        # Tokens ruled out have log-probability -inf and add nothing.
        entropy[part] = -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(dim=-1)
    return entropy.view(logits.shape[:-1])


class _TokenLogProbs(torch.autograd.Function):
    """Keeps the logits and one number a token for the backward pass, where the softmax is computed anew."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        norm = torch.empty(len(logits), dtype=_precision(logits), device=logits.device)
        chosen = torch.empty_like(norm)
        for part in _chunks(logits):
            scaled = _scaled(logits[part], temperature)
            norm[part] = scaled.logsumexp(dim=-1)
            chosen[part] = scaled.gather(1, ids[part, None])[:, 0]
        ctx.save_for_backward(logits, ids, norm)
        ctx.temperature = temperature
        return chosen - norm

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, norm = ctx.saved_tensors
        step = grads[0] / ctx.temperature
        result = torch.empty_like(logits)
        for part in _chunks(logits):
            softmax = (_scaled(logits[part], ctx.temperature) - norm[part, None]).exp()
            result[part] = softmax.mul_(-step[part, None]).scatter_add_(1, ids[part, None], step[part, None])
        return result, None, None


def _precision(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.to(_precision(logits)) / temperature


def _chunks(logits: Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    return (slice(start, start + rows) for start in range(0, len(logits), rows))
