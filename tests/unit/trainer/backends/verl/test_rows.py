from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.errors import TrainerError
from agl_runtime.trainer.backends.verl.rows import Label, mini_batch_rows, spread_rows
from fakes.groups import rows_of
from fakes.rows import sample

ONE, TWO = sample([False, True, True], seed=1), sample([True], seed=2)


def plain(field: Any) -> Any:
    return field.tolist() if isinstance(field, torch.Tensor) else field


def test_a_sample_becomes_the_fields_that_verls_trainer_reads():
    rows = rows_of("g7", [(1.0, [ONE]), (0.0, [TWO])])
    first = rows.fields[0]
    ids = ONE.ids.tolist()
    assert {name: plain(value) for name, value in first.items()} == {
        "prompts": ids[:1],
        "responses": ids[1:],
        "input_ids": ids,
        "position_ids": [0, 1, 2, 3],
        "response_mask": [0, 1, 1],
        "loss_mask": [0, 1, 1],
        "rollout_log_probs": ONE.logprobs[1:].tolist(),
        "rm_scores": [0.0, 0.0, 1.0],
        "uid": "g7:0:1:2:2:3:1.0",
        "num_turns": 1,
        "data_source": "agl",
        "extra_fields": {},
        "global_steps": 4,
    }
    assert {name: value.dtype for name, value in first.items() if isinstance(value, torch.Tensor)} == dict.fromkeys(
        ("prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask"), torch.int64
    ) | dict.fromkeys(("rollout_log_probs", "rm_scores"), torch.float32)
    assert rows.tags[0] == {
        "status": "success",
        "prompt_len": 1,
        "response_len": 3,
        "seq_len": 4,
        "global_steps": 4,
        "min_global_steps": 3,
        "max_global_steps": 3,
        "is_padding": False,
        "trained_tokens": 2,
    }


def test_every_sample_of_a_rollout_is_a_row_with_the_rollouts_reward_and_counts():
    rows = rows_of("g", [(1.0, [ONE, TWO]), (0.5, [TWO])])
    assert rows.keys == ("g_0_0", "g_0_1", "g_1_0")
    assert [Label.parse(field["uid"]) for field in rows.fields] == [
        Label("g", 0, 2, 3, 2, 3, 1.0),
        Label("g", 0, 2, 3, 1, 1, 1.0),
        Label("g", 1, 1, 1, 1, 1, 0.5),
    ]
    assert [float(field["rm_scores"].sum()) for field in rows.fields] == [1.0, 1.0, 0.5]


def test_a_group_whose_rewards_do_not_differ_is_one_placeholder_a_rollout_that_still_counts():
    rows = rows_of("g", [(1.0, [ONE, TWO]), (1.0, [TWO])])
    assert rows.keys == ("g_0_0", "g_1_0")
    assert [plain(field["response_mask"]) for field in rows.fields] == [[0], [0]]
    assert [plain(field["input_ids"]) for field in rows.fields] == [[0, 0], [0, 0]]
    assert [Label.parse(field["uid"]) for field in rows.fields] == [
        Label("g", 0, 2, 3, 0, 1, 1.0),
        Label("g", 1, 1, 1, 0, 1, 1.0),
    ]
    assert [tag["trained_tokens"] for tag in rows.tags] == [0, 0]
    assert {tag["max_global_steps"] for tag in rows.tags} == {3}


def test_an_algorithm_without_groups_trains_on_equal_rewards_too():
    rows = rows_of("g", [(1.0, [ONE, TWO]), (1.0, [TWO])], flat_trains=True)
    assert [tag["trained_tokens"] for tag in rows.tags] == [2, 1, 1]


def test_a_rollout_with_a_reward_and_nothing_to_train_on_is_a_placeholder_of_the_version_before_the_step():
    rows = rows_of("g", [(1.0, []), (0.0, [TWO])])
    assert rows.keys == ("g_0_0", "g_1_0")
    assert Label.parse(rows.fields[0]["uid"]) == Label("g", 0, 0, 0, 0, 1, 1.0)
    assert (rows.tags[0]["min_global_steps"], rows.tags[0]["max_global_steps"]) == (3, 3)


def test_a_rollout_without_a_reward_has_no_row():
    assert rows_of("g", [(None, [ONE]), (0.0, [TWO]), (1.0, [ONE])]).keys == ("g_1_0", "g_2_0")
    nothing = rows_of("g", [(None, [ONE])])
    assert (nothing.keys, nothing.fields, nothing.tags) == ((), (), ())


def test_versions_are_those_of_the_trained_tokens_and_never_below_zero():
    mixed = sample([True, False, True])
    mixed.updates[:] = [-1, 2, -1, 5]
    rows = rows_of("g", [(1.0, [mixed]), (0.0, [])], step=0)
    assert [(tag["min_global_steps"], tag["max_global_steps"]) for tag in rows.tags] == [(2, 5), (0, 0)]


def test_a_truncated_sample_scores_on_its_last_token_though_it_is_not_trained():
    cut = sample([True, True, False])
    field = rows_of("g", [(0.25, [cut]), (0.0, [TWO])]).fields[0]
    assert plain(field["rm_scores"]) == [0.0, 0.0, 0.25]
    assert plain(field["response_mask"]) == [1, 1, 0]


def test_validation_has_one_row_a_rollout_under_the_groups_own_name():
    rows = rows_of("g", [(1.0, [ONE, TWO]), (1.0, []), (None, [ONE])], validate=True)
    assert rows.keys == ("g_0_0", "g_1_0")
    assert [field["uid"] for field in rows.fields] == ["g", "g"]
    assert plain(rows.fields[0]["input_ids"]) == TWO.ids.tolist()


def test_a_reward_that_is_not_finite_is_an_error():
    with pytest.raises(TrainerError, match="A reward of group g is not finite"):
        rows_of("g", [(math.nan, [ONE]), (0.0, [TWO])])


def test_samples_are_left_as_they_were():
    before = [array.copy() for array in (ONE.ids, ONE.mask, ONE.logprobs, ONE.updates)]
    for field in rows_of("g", [(1.0, [ONE]), (0.0, [TWO])]).fields:
        for value in field.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    for array, kept in zip((ONE.ids, ONE.mask, ONE.logprobs, ONE.updates), before, strict=True):
        np.testing.assert_array_equal(array, kept)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 99))
def test_a_label_keeps_a_reward_to_the_bit(reward: float, session: int):
    label = Label("3f-a", session, 2, 30, 10, 12, reward)
    assert Label.parse(str(label)) == label


def test_what_verl_adds_to_fill_a_batch_has_no_label():
    assert Label.parse("pad0123456789abcdef") is None


@given(st.integers(1, 500), st.integers(1, 12), st.integers(1, 6), st.integers(1, 8))
def test_padded_rows_are_cut_into_as_many_mini_batches_as_wanted(rows: int, group_size: int, minis: int, dp: int):
    each = mini_batch_rows(rows, group_size, minis, dp) * group_size
    assert each % dp == 0
    assert each * minis >= rows
    # No smaller one would hold them.
    assert (each - math.lcm(group_size, dp)) * minis < rows


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 5))
def test_rows_with_a_gradient_are_dealt_out_evenly(kinds: list[bool], minis: int):
    trains = kinds * minis
    order = spread_rows(trains, minis)
    assert sorted(order) == list(range(len(trains)))
    size = len(kinds)
    counts = [sum(trains[row] for row in order[n * size : (n + 1) * size]) for n in range(minis)]
    assert max(counts) - min(counts) <= 1
