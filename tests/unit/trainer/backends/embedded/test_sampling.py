from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.trainer.backends.embedded.sampling import SamplingParams, draw, log_distribution

PROBS = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
LOGITS = PROBS.log()


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, **changes})  # type: ignore[arg-type]


def distribution(**changes: object) -> list[float]:
    return log_distribution(LOGITS, [params(**changes)]).exp()[0].tolist()


def test_temperature_divides_the_logits() -> None:
    want = (LOGITS / 0.5).softmax(-1)[0].tolist()
    assert distribution(temperature=0.5) == pytest.approx(want)


@pytest.mark.parametrize(
    ("top_p", "want"),
    [(0.5, [1, 0, 0, 0]), (0.51, [0.625, 0.375, 0, 0]), (0.9, [10 / 19, 6 / 19, 3 / 19, 0]), (0.01, [1, 0, 0, 0])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it_and_renormalises(top_p: float, want: list[float]) -> None:
    assert distribution(top_p=top_p) == pytest.approx(want, abs=1e-6)


def test_top_k_keeps_the_k_most_likely() -> None:
    assert distribution(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)


def test_top_p_counts_within_what_top_k_left() -> None:
    assert distribution(top_k=2, top_p=0.6) == pytest.approx([1, 0, 0, 0])


def test_each_row_has_its_own_distribution() -> None:
    rows = [params(), params(top_p=0.5), params(temperature=2.0), params(top_k=1, temperature=3.0)]
    together = log_distribution(LOGITS.repeat(4, 1), rows)
    for row, alone in zip(together, rows, strict=True):
        torch.testing.assert_close(row, log_distribution(LOGITS, [alone])[0])


def test_draws_follow_the_distribution() -> None:
    uniforms = [(i + 0.5) / 1000 for i in range(1000)]
    result = draw(LOGITS.repeat(1000, 1), [params()] * 1000, uniforms)
    assert [[token.id for token in result].count(i) for i in range(4)] == [500, 300, 150, 50]


def test_the_reported_logprob_is_that_of_the_distribution_sampled_from() -> None:
    [token] = draw(LOGITS, [params(top_p=0.6)], [0.9])
    assert token.id == 1
    assert token.logprob == pytest.approx(math.log(0.375), abs=1e-6)


def test_greedy_takes_the_most_likely_and_reports_it_under_the_unchanged_model() -> None:
    result = draw(LOGITS.repeat(2, 1), [params(temperature=0.0, top_p=0.1, top_logprobs=2), params()], [0.99, 0.99])
    assert [token.id for token in result] == [0, 3]
    assert result[0].logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [token_id for token_id, _ in result[0].top] == [0, 1]


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=9),
    st.sampled_from([0.0, 0.5, 1 - 2**-53]),
    st.floats(0.05, 1.0),
)
def test_no_token_outside_the_distribution_is_ever_drawn(logits: list[float], uniform: float, top_p: float) -> None:
    [token] = draw(torch.tensor([logits]), [params(top_p=top_p)], [uniform])
    assert math.isfinite(token.logprob)


def test_tops_are_per_row_and_leave_out_what_cannot_be_sampled() -> None:
    result = draw(LOGITS.repeat(3, 1), [params(), params(top_logprobs=2), params(top_logprobs=9, top_k=3)], [0.1] * 3)
    assert [[token_id for token_id, _ in token.top] for token in result] == [[], [0, 1], [0, 1, 2]]
