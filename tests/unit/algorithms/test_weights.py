from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.algorithms.weights import Normalization, row_weights
from fakes.rows import Size

TRAINED = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), min_size=1, max_size=6)


def size_of(trained: list[list[int]]) -> Size:
    return Size(len(trained), sum(map(len, trained)), sum(map(sum, trained)))


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        ("rollout", [[1 / 2 / 4, 1 / 2 / 4], [1 / 2 / 5]]),
        ("sample", [[1 / 3 / 1, 1 / 3 / 3], [1 / 3 / 5]]),
        ("token", [[1 / 9, 1 / 9], [1 / 9]]),
    ],
)
def test_known_values(normalization: Normalization, expected: list[list[float]]):
    trained = [[1, 3], [5]]
    got = row_weights(trained, size_of(trained), normalization)
    assert got == [pytest.approx(row, rel=1e-15) for row in expected]


@given(TRAINED, st.sampled_from(["rollout", "sample", "token"]))
def test_the_weights_of_all_trained_tokens_sum_to_one(trained: list[list[int]], normalization: Normalization):
    weights = row_weights(trained, size_of(trained), normalization)
    total = sum(w * n for ws, ns in zip(weights, trained, strict=True) for w, n in zip(ws, ns, strict=True))
    assert total == pytest.approx(1.0)


@given(TRAINED)
def test_under_rollout_each_rollout_weighs_the_same_whatever_its_samples(trained: list[list[int]]):
    weights = row_weights(trained, size_of(trained), "rollout")
    for ws, ns in zip(weights, trained, strict=True):
        assert sum(w * n for w, n in zip(ws, ns, strict=True)) == pytest.approx(1 / len(trained))


@pytest.mark.parametrize("normalization", ["rollout", "sample", "token"])
def test_what_is_not_computed_still_counts_in_the_mean(normalization: Normalization):
    whole = [[2, 3], [4], [6]]
    assert (
        row_weights(whole[:2], size_of(whole), normalization) == row_weights(whole, size_of(whole), normalization)[:2]
    )


@pytest.mark.parametrize("normalization", ["rollout", "sample"])
def test_a_part_without_trained_tokens_has_weight_zero(normalization: Normalization):
    assert row_weights([[0], [2]], Size(2, 2, 2), normalization) == [[0.0], [0.25]]
