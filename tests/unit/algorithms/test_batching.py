from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.algorithms.batching import TrainRow, micro_batches, mini_batches, pad_rows, to_tensors, train_rows
from fakes.rows import Rollout, sample, scored, size_of

torch.set_num_threads(1)

MASKS = st.lists(st.booleans(), min_size=1, max_size=12)
ROLLOUTS = st.lists(
    st.builds(lambda masks: scored(0.5, *(sample(mask) for mask in masks)), st.lists(MASKS, max_size=3)),
    min_size=1,
    max_size=8,
)


def rows_of(lengths: list[list[int]]) -> list[TrainRow]:
    """Rows of these lengths (all but the first token trained), by rollout."""
    rollouts = [scored(1.0, *(sample([True] * (n - 1)) for n in row)) for row in lengths]
    return train_rows(rollouts, size_of(rollouts), "rollout")


def same_rows(a: list[TrainRow], b: list[TrainRow]) -> bool:
    return sorted(id(row.row) for row in a) == sorted(id(row.row) for row in b)


class TestTrainRows:
    def test_a_rollouts_advantage_goes_to_each_of_its_samples(self):
        rollouts = [scored(2.0, sample([True]), sample([True, True])), scored(-1.0, sample([False, True]))]
        rows = train_rows(rollouts, size_of(rollouts), "rollout")
        assert [(row.rollout, row.advantage) for row in rows] == [(0, 2.0), (0, 2.0), (1, -1.0)]
        assert [row.weight for row in rows] == pytest.approx([1 / 6, 1 / 6, 1 / 2])

    def test_only_rows_without_a_trained_token_are_left_out(self):
        rollouts = [scored(1.0, sample([False]), sample([True])), scored(1.0, sample([False])), scored(1.0)]
        rows = train_rows(rollouts, size_of(rollouts), "rollout")
        assert [row.row for row in rows] == [rollouts[0].samples.samples[1]]


class TestMiniBatches:
    @given(ROLLOUTS, st.integers(1, 5))
    def test_whole_rollouts_each_once_in_balanced_numbers(self, rollouts: list[Rollout], count: int):
        rows = train_rows(rollouts, size_of(rollouts), "rollout")
        cut = mini_batches(rows, count)
        rollouts_in = [{row.rollout for row in mini} for mini in cut]
        assert same_rows([row for mini in cut for row in mini], rows)
        assert len(cut) == min(count, len({row.rollout for row in rows}))
        assert sum(map(len, rollouts_in)) == len({row.rollout for row in rows})
        if cut:
            numbers = [len(members) for members in rollouts_in]
            tokens = [sum(row.length for row in mini) for mini in cut]
            longest = max(sum(row.length for row in rows if row.rollout == r) for r in {row.rollout for row in rows})
            assert max(numbers) - min(numbers) <= 1
            assert max(tokens) - min(tokens) <= longest

    def test_tokens_are_balanced(self):
        cut = mini_batches(rows_of([[100], [90], [20], [10]]), 2)
        assert sorted(sum(row.length for row in mini) for mini in cut) == [110, 110]

    def test_a_rollout_weighs_the_same_in_whichever_mini_batch_it_falls(self):
        rows = rows_of([[9], [2, 2], [30], [4]])
        for mini in mini_batches(rows, 2):
            for rollout in {row.rollout for row in mini}:
                share = sum(row.weight * row.row.mask.sum() for row in mini if row.rollout == rollout)
                assert share == pytest.approx(1 / 2)

    def test_no_rows_make_no_mini_batch(self):
        assert mini_batches([], 3) == []


class TestMicroBatches:
    @given(st.lists(st.integers(2, 30), max_size=12), st.integers(1, 64))
    def test_the_budget_holds_with_padding_and_every_row_is_there_once(self, lengths: list[int], budget: int):
        rows = rows_of([[n] for n in lengths])
        packed = micro_batches(rows, budget)
        assert same_rows([row for micro in packed for row in micro], rows)
        for micro in packed:
            padded = len(micro) * max(row.length for row in micro)
            assert padded <= budget or len(micro) == 1

    def test_rows_of_like_length_go_together(self):
        packed = micro_batches(rows_of([[n] for n in (3, 40, 4, 10, 9)]), 20)
        assert [[row.length for row in micro] for micro in packed] == [[40], [10, 9], [4, 3]]


class TestPadding:
    def test_rows_of_weight_zero_fill_up_to_a_multiple(self):
        rows = rows_of([[5], [3], [4]])
        padded = pad_rows(rows, 4)
        assert padded[:3] == rows
        assert [(row.length, row.weight) for row in padded[3:]] == [(3, 0.0)]

    def test_nothing_is_added_where_nothing_is_missing(self):
        rows = rows_of([[5], [3]])
        assert pad_rows(rows, 2) == rows
        assert pad_rows([], 4) == []


class TestToTensors:
    def test_rows_are_padded_on_the_right_and_side_values_follow_the_trained_tokens(self):
        one, two = sample([True, False, True]), sample([True], seed=1)
        batch = to_tensors([TrainRow(one, 0, 2.0, 0.25), TrainRow(two, 1, -1.0, 0.5)], pad_id=6)
        assert batch.ids.tolist() == [one.ids.tolist(), [*two.ids.tolist(), 6, 6]]
        assert batch.attention.tolist() == [[True] * 4, [True, True, False, False]]
        assert batch.targets.tolist() == [one.ids[1], one.ids[3], two.ids[1]]
        assert batch.recorded.tolist() == [one.logprobs[1], one.logprobs[3], two.logprobs[1]]
        assert batch.updates.tolist() == [3, 3, 3]
        assert batch.advantages.tolist() == [2.0, 2.0, -1.0]
        assert batch.weights.tolist() == [0.25, 0.25, 0.5]
        assert (batch.ids.dtype, batch.recorded.dtype, batch.weights.dtype) == (
            torch.int64,
            torch.float32,
            torch.float32,
        )

    def test_select_takes_the_outputs_that_predict_the_trained_tokens(self):
        batch = to_tensors(
            [TrainRow(sample([True, False, True]), 0, 1.0, 1.0), TrainRow(sample([True]), 1, 1.0, 1.0)], 0
        )
        outputs = torch.tensor([[0, 1, 2, 3], [10, 11, 12, 13]])
        assert batch.select(outputs).tolist() == [0, 2, 10]
        assert batch.select(outputs[..., None].expand(2, 4, 5)).shape == (3, 5)

    def test_outputs_of_the_columns_before_the_first_trained_token_are_not_needed(self):
        late, later = sample([False, True, False, True]), sample([False, False, True], seed=1)
        batch = to_tensors([TrainRow(late, 0, 1.0, 1.0), TrainRow(later, 1, 1.0, 1.0)], 0)
        outputs = torch.arange(20).view(2, 5, 2)
        whole = batch.select(outputs)
        assert batch.columns < 5
        assert torch.equal(batch.select(outputs[:, -batch.columns :]), whole)

    def test_samples_stay_as_they_were(self):
        row = sample([True, True])
        before = (row.ids.tobytes(), row.mask.tobytes(), row.logprobs.tobytes())
        batch = to_tensors([TrainRow(row, 0, 1.0, 1.0)], 0)
        for tensor in (batch.ids, batch.recorded, batch.weights):
            tensor.fill_(1)
        assert before == (row.ids.tobytes(), row.mask.tobytes(), row.logprobs.tobytes())

    @given(ROLLOUTS)
    def test_weights_of_a_batch_sum_to_one(self, rollouts: list[Rollout]):
        rows = train_rows(rollouts, size_of(rollouts), "rollout")
        if rows:
            assert to_tensors(rows, 0).weights.double().sum().item() == pytest.approx(1.0, rel=1e-5)

    def test_many_rows_keep_their_order(self):
        rows = rows_of([[n] for n in (4, 2, 7)])
        batch = to_tensors(rows, 0)
        assert np.array_equal(batch.targets.numpy(), np.concatenate([row.row.ids[1:] for row in rows]))
