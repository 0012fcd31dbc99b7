"""Drawing one token a row from logits, and the log-probability with which it was drawn.

Invariant: a reported log-probability belongs to the distribution that was really sampled from, that is after
temperature, top-k and top-p. At temperature 0 the most likely token is taken, and what is reported is its
log-probability under the unchanged model (temperature 1), because the "distribution" is then a single point.

A row draws by inverting its cumulative distribution at a number of its own random stream, so the rows of a batch do not
influence each other's draws. (The logits of a row still differ by rounding with the shape of the batch around it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Token(NamedTuple):
    """A sampled token. `top` are the most likely (id, log-probability) in its place, most likely first."""

    id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """`top_k` 0 means all tokens. `top_logprobs` is how many alternatives are reported for each token."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    top_logprobs: int = 0


def log_distribution(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities [rows, vocabulary] of what is sampled from, given float32 `logits` of that shape."""
    if any(p.temperature not in (0.0, 1.0) for p in params):
        logits = logits / logits.new_tensor([p.temperature or 1.0 for p in params])[:, None]
    logprobs = logits.log_softmax(-1)
    if any(p.temperature and (p.top_p < 1 or p.top_k) for p in params):
        logprobs = _truncate(logprobs, params)
    return logprobs


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[Token]:
    """Sample a token for each row; `uniforms` are numbers in [0, 1)."""
    logprobs = log_distribution(logits, params)
    cumulative = logprobs.double().exp().cumsum(-1)
    # Dividing makes the last entry exactly 1, so every number below 1 falls on a token of positive probability.
    cumulative = cumulative / cumulative[:, -1:]
    points = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
    ids = torch.searchsorted(cumulative, points, right=True)
    if not all(p.temperature for p in params):
        greedy = torch.tensor([not p.temperature for p in params], device=logits.device)[:, None]
        ids = torch.where(greedy, logprobs.argmax(-1, keepdim=True), ids)
    chosen = logprobs.gather(1, ids)
    return list(map(Token, ids[:, 0].tolist(), chosen[:, 0].tolist(), _tops(logprobs, params)))


def _truncate(logprobs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    size = logprobs.shape[-1]
    top_k = torch.tensor([p.top_k if p.top_k and p.temperature else size for p in params], device=logprobs.device)
    top_p = logprobs.new_tensor([p.top_p if p.top_p < 1 and p.temperature else torch.inf for p in params])
    ordered, order = logprobs.sort(-1, descending=True)
    ordered = ordered.masked_fill(torch.arange(size, device=logprobs.device) >= top_k[:, None], -torch.inf)
    probs = ordered.softmax(-1)
    # The token that crosses the limit is kept, so at least one always is.
    ordered = ordered.masked_fill(probs.cumsum(-1) - probs >= top_p[:, None], -torch.inf)
    return torch.empty_like(logprobs).scatter_(-1, order, ordered).log_softmax(-1)


def _tops(logprobs: Tensor, params: Sequence[SamplingParams]) -> list[list[tuple[int, float]]]:
    most = max(p.top_logprobs for p in params)
    if not most:
        return [[] for _ in params]
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    rows = zip(ids.tolist(), values.tolist(), params, strict=True)
    return [[pair for pair in zip(i, v, strict=True) if pair[1] > -torch.inf][: p.top_logprobs] for i, v, p in rows]
