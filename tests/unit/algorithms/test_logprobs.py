from __future__ import annotations

import math

import pytest
import torch

from agl_runtime.algorithms import logprobs
from agl_runtime.algorithms.logprobs import token_entropy, token_logprobs

torch.set_num_threads(1)


@pytest.fixture(params=[1 << 24, 7])
def _chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and one token at a time."""
    monkeypatch.setattr(logprobs, "_CHUNK_ELEMENTS", request.param)


def example(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(*shape, 5, generator=generator)
    return logits.to(dtype), torch.randint(0, 5, shape, generator=generator)


@pytest.mark.usefixtures("_chunked")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradient_are_those_of_log_softmax(temperature: float):
    logits, ids = example(2, 3)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.arange(6.0).view(2, 3) - 2
    got = token_logprobs(ours, ids, temperature)
    want = torch.log_softmax(theirs / temperature, -1).gather(-1, ids[..., None])[..., 0]
    torch.testing.assert_close(got, want)
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.usefixtures("_chunked")
def test_the_gradient_is_the_numerical_one():
    logits, ids = example(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, 1.3), (logits.requires_grad_(),))


def test_half_precision_logits_are_normalised_in_float32():
    logits, ids = example(50, dtype=torch.bfloat16)
    logits.requires_grad_()
    got = token_logprobs(logits, ids)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.log_softmax(logits.float(), -1).gather(-1, ids[:, None])[:, 0])
    got.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_nothing_to_score_gives_nothing():
    logits = torch.empty(0, 5, requires_grad=True)
    token_logprobs(logits, torch.empty(0, dtype=torch.int64)).sum().backward()
    assert token_entropy(logits).shape == (0,)


@pytest.mark.usefixtures("_chunked")
def test_entropy_of_known_distributions():
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0]], [[1e4, 0.0, 0.0, 0.0]], [[0.0, 0.0, -math.inf, -math.inf]]])
    expected = torch.tensor([[math.log(4)], [0.0], [math.log(2)]])
    torch.testing.assert_close(token_entropy(logits), expected)
    torch.testing.assert_close(token_entropy(logits, temperature=2.0), expected)


def test_entropy_takes_no_gradient():
    logits, _ = example(3)
    assert not token_entropy(logits.requires_grad_()).requires_grad
