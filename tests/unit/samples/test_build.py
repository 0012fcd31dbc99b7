from __future__ import annotations

import numpy as np
import pytest

from agl_runtime.calls import VersionSpan
from agl_runtime.samples.build import build_samples
from agl_runtime.samples.types import BuildReport, Limits, RolloutSamples, total_report
from agl_runtime.schemas import PolicyVersion
from fakes.token_calls import call, rollout, untrainable

WIDE = Limits(max_prompt_tokens=1000, max_response_tokens=1000)


def build(*calls, limits: Limits = WIDE) -> RolloutSamples:
    return build_samples(rollout(*calls), limits)


def lines(result: RolloutSamples) -> list[tuple[str, ...]]:
    return [sample.call_ids for sample in result.samples]


def trained(result: RolloutSamples) -> list[list[int]]:
    """The trained ids of each sample."""
    return [sample.ids[sample.mask].tolist() for sample in result.samples]


MAIN = [1, 2]
A = call("a", MAIN, [11, 12])
B = call("b", [*MAIN, 11, 12, 3], [13, 14])
C = call("c", [*MAIN, 11, 12, 3, 13, 14, 4], [15])


def test_turns_of_one_conversation_are_one_sample_that_trains_sampled_tokens_only():
    result = build(A, B, C)
    (sample,) = result.samples
    assert sample.ids.tolist() == [1, 2, 11, 12, 3, 13, 14, 4, 15]
    assert sample.mask.tolist() == [False, False, True, True, False, True, True, False, True]
    assert sample.logprobs == pytest.approx([0, 0, -12, -13.01, 0, -14, -15.01, 0, -16])
    assert sample.updates.tolist() == [-1, -1, 3, 3, -1, 3, 3, -1, 3]
    assert sample.prompt_len == 2
    assert sample.call_ids == ("a", "b", "c")
    assert sample.split is None
    assert not sample.truncated
    assert result.report == BuildReport(calls=3, sampled_tokens=5, trained_tokens=5)
    assert result.report.trained_share == 1.0


def test_versions_are_taken_span_by_span():
    spans = (VersionSpan(0, 1, PolicyVersion(1, 6)), VersionSpan(1, 3, PolicyVersion(1, 7)))
    (sample,) = build(call("a", MAIN, [11, 12, 13], spans=spans)).samples
    assert sample.updates.tolist() == [-1, -1, 6, 7, 7]


def test_a_sub_agent_and_a_title_in_between_do_not_break_the_main_line():
    title = untrainable("title", [7, 7], [70], "auxiliary", kind="auxiliary")
    result = build(A, title, call("sub1", [8], [80]), B, call("sub2", [8, 80, 9], [81]), C)
    assert lines(result) == [("sub1", "sub2"), ("a", "b", "c")]
    assert trained(result) == [[80, 81], [11, 12, 13, 14, 15]]
    assert result.report.untrained == {"auxiliary": 1}
    assert result.report.trained_share == pytest.approx(7 / 8)


def test_what_follows_a_compaction_is_trained_like_the_main_line():
    result = build(A, B, call("compacted", [1, 5, 5], [16]))
    assert trained(result) == [[11, 12, 13, 14], [16]]


def test_an_auxiliary_call_is_not_trained_even_where_it_is_marked_trainable():
    result = build(A, call("title", [7], [70], kind="auxiliary"))
    assert trained(result) == [[11, 12]]
    assert result.report.untrained == {"auxiliary": 1}


def test_a_call_continues_the_longest_trace_that_its_prompt_begins_with():
    short = call("short", MAIN, [11])
    result = build(short, A, B)
    assert lines(result) == [("a", "b")]
    assert result.report.untrained == {"superseded": 1}


def test_a_prompt_that_adds_nothing_to_a_trace_continues_it():
    assert lines(build(A, call("b", [*MAIN, 11, 12], [13]))) == [("a", "b")]


def test_tokens_that_two_leaves_share_are_trained_in_the_leaf_committed_first():
    left = call("left", [*MAIN, 11, 12, 5], [20])
    right = call("right", [*MAIN, 11, 12, 6], [30])
    later_right = call("right2", [*MAIN, 11, 12, 6, 30, 7], [31])
    result = build(A, right, left, later_right)
    assert lines(result) == [("a", "left"), ("a", "right", "right2")]
    assert trained(result) == [[11, 12, 20], [30, 31]]
    assert result.samples[1].logprobs[2:4] == pytest.approx([-12, -13.01]), "masked tokens keep what was recorded"


def test_commit_order_decides_and_not_the_order_of_starting():
    late = call("late", [*MAIN, 11, 12, 5], [20], seq=1)
    early = call("early", [*MAIN, 11, 12, 6], [30], seq=2)
    assert trained(build(A, early, late)) == [[11, 12, 30], [20]]


def test_a_recorded_link_outranks_a_longer_trace():
    linked = call("linked", [*MAIN, 11, 12, 3], [13], parent_id="a")
    twin = call("twin", [*MAIN, 11], [12, 3])
    assert lines(build(A, twin, linked)) == [("twin",), ("a", "linked")]


def test_a_recorded_link_that_the_ids_contradict_gives_way_to_the_ids():
    other = call("other", [9, 9], [90])
    assert lines(build(A, other, call("b", [*MAIN, 11, 12, 3], [13], parent_id="other"))) == [("other",), ("a", "b")]


def test_a_recorded_link_to_a_later_or_unknown_call_is_no_link():
    assert lines(build(call("a", MAIN, [11, 12], parent_id="b"), B)) == [("a", "b")]
    assert lines(build(A, call("b", [*MAIN, 11, 12, 3], [13], parent_id="gone"))) == [("a", "b")]


@pytest.mark.parametrize("link", [None, "empty"])
def test_an_empty_generation_is_never_a_parent(link: str | None):
    empty = untrainable("empty", [*MAIN, 11, 12, 3], [], "empty_generation")
    b = call("b", [*MAIN, 11, 12, 3], [13], parent_id=link)
    result = build(A, empty, b)
    assert lines(result) == [("a", "b")]
    assert result.report.untrained == {"empty_generation": 1}


def test_an_untrainable_call_in_the_middle_is_masked_context():
    middle = untrainable("b", [*MAIN, 11, 12, 3], [13, 14], "wrong_model", logprobs=[])
    result = build(A, middle, C)
    assert lines(result) == [("a", "b", "c")]
    assert trained(result) == [[11, 12, 15]]
    assert result.samples[0].logprobs[5:7].tolist() == [0, 0]
    assert result.report.untrained == {"wrong_model": 1}


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        ([-1.0], "logprobs_length"),
        ([-1.0, float("nan")], "logprobs_not_finite"),
        ([float("-inf"), 0.0], "logprobs_not_finite"),
    ],
)
def test_unusable_logprobs_never_reach_a_sample(logprobs: list[float], reason: str):
    result = build(call("a", MAIN, [11, 12], logprobs=logprobs), B)
    assert result.samples[0].logprobs.tolist()[:4] == [0, 0, 0, 0]
    assert trained(result) == [[13, 14]]
    assert result.report.untrained == {reason: 1}


def test_a_branch_that_trains_nothing_makes_no_row_and_is_counted():
    cut = untrainable("cut", [*MAIN, 11, 12, 3, 13, 14, 4], [15], "cut")
    result = build(A, B, cut)
    assert lines(result) == [("a", "b")]
    assert result.report.untrained == {"cut": 1}


def test_calls_without_a_commit_or_without_ids_are_counted_and_left_out():
    result = build(
        call("open", [1], [2], committed=False, trainable=False),
        untrainable("foreign", [], [], "no_prompt_ids"),
        untrainable("failed", [1, 2], [], "error"),
        A,
    )
    assert lines(result) == [("a",)]
    assert result.report.calls == 4
    assert result.report.untrained == {"not_committed": 1, "no_prompt_ids": 1, "error": 1}


def test_a_rollout_without_calls_has_no_samples():
    assert build() == RolloutSamples("r", (), BuildReport(0, 0, 0))
    assert build().report.trained_share == 0.0


class TestRetries:
    def test_the_continued_one_of_two_with_the_same_prompt_is_trained(self):
        result = build(call("lost", MAIN, [50]), A, B)
        assert lines(result) == [("a", "b")]
        assert result.report.untrained == {"superseded": 1}

    def test_being_continued_outranks_being_delivered(self):
        unseen = call("a", MAIN, [11, 12], delivered=False)
        assert lines(build(call("lost", MAIN, [50]), unseen, B)) == [("a", "b")]

    def test_a_link_shows_what_was_continued_even_where_the_ids_broke(self):
        rewritten = call("b", [*MAIN, 99, 3], [13], parent_id="a")
        result = build(A, call("lost", MAIN, [50]), rewritten)
        assert lines(result) == [("a",), ("b",)]
        assert result.report.untrained == {"superseded": 1}

    def test_two_that_were_both_continued_are_both_trained(self):
        result = build(A, call("a2", MAIN, [50]), B, call("b2", [*MAIN, 50, 3], [51]))
        assert lines(result) == [("a", "b"), ("a2", "b2")]

    def test_without_continuation_the_only_delivered_one_is_trained(self):
        result = build(A, call("x", [*MAIN, 11, 12, 3], [50], delivered=False), B)
        assert lines(result) == [("a", "b")]
        assert result.report.untrained == {"superseded": 1}

    def test_votes_over_one_prompt_that_were_all_delivered_are_all_trained(self):
        votes = [call(name, [*MAIN, 11, 12, 3], [token]) for name, token in (("x", 50), ("y", 51), ("z", 51))]
        lost = call("lost", [*MAIN, 11, 12, 3], [52], delivered=False)
        result = build(A, *votes, lost)
        assert lines(result) == [("a", "x"), ("a", "y"), ("a", "z")]
        assert result.report.untrained == {"superseded": 1}
        assert result.report.splits == {}

    def test_an_unresolved_last_retry_is_not_trained(self):
        x = call("x", [*MAIN, 11, 12, 3], [50], delivered=False)
        y = call("y", [*MAIN, 11, 12, 3], [51], delivered=False)
        result = build(A, x, y)
        assert lines(result) == [("a",)]
        assert result.report.untrained == {"unresolved_retry": 2}

    def test_the_same_prompt_under_another_parent_is_no_retry(self):
        twin = call("twin", [*MAIN, 11], [12])
        x = call("x", [*MAIN, 11, 12, 3], [50], parent_id="a")
        y = call("y", [*MAIN, 11, 12, 3], [51], parent_id="twin")
        assert lines(build(A, twin, x, y)) == [("a", "x"), ("twin", "y")]


class TestAmbiguousParents:
    def test_parents_that_cannot_be_told_apart_are_context_and_not_trained(self):
        result = build(A, call("a2", MAIN, [11, 12]), B)
        assert trained(result) == [[13, 14]]
        assert result.samples[0].ids.tolist() == [1, 2, 11, 12, 3, 13, 14]
        assert result.report.untrained == {"ambiguous_parent": 2}

    def test_equal_traces_cut_differently_are_just_as_ambiguous(self):
        result = build(A, call("a2", [*MAIN, 11], [12]), B)
        assert trained(result) == [[13, 14]]
        assert result.report.untrained == {"ambiguous_parent": 2}

    def test_the_only_delivered_one_is_the_parent(self):
        result = build(call("lost", MAIN, [11, 12], delivered=False), A, B)
        assert lines(result) == [("a", "b")]
        assert result.report.untrained == {"superseded": 1}

    def test_a_recorded_link_tells_them_apart(self):
        linked = call("b", [*MAIN, 11, 12, 3], [13, 14], parent_id="a2")
        result = build(A, call("a2", MAIN, [11, 12]), linked)
        assert lines(result) == [("a2", "b")]
        assert result.report.untrained == {"superseded": 1}


class TestLimits:
    def test_the_response_side_is_cut_with_every_side_array(self):
        result = build(A, B, C, limits=Limits(2, 4))
        (sample,) = result.samples
        assert sample.ids.tolist() == [1, 2, 11, 12, 3, 13]
        assert {a.size for a in (sample.ids, sample.mask, sample.logprobs, sample.updates)} == {6}
        assert trained(result) == [[11, 12, 13]]
        assert sample.call_ids == ("a", "b")
        assert sample.truncated
        assert result.report.untrained == {"response_over_limit": 1}
        assert result.report.trained_share == pytest.approx(3 / 5)

    def test_a_sample_exactly_at_both_limits_is_whole(self):
        (sample,) = build(A, B, C, limits=Limits(2, 7)).samples
        assert not sample.truncated
        assert sample.ids.size == 9

    def test_a_first_prompt_over_its_limit_drops_the_sample_with_a_count(self):
        result = build(A, B, call("other", [4], [40]), limits=Limits(1, 100))
        assert lines(result) == [("other",)]
        assert result.report.dropped == {"prompt_over_limit": 1}
        assert result.report.untrained == {"prompt_over_limit": 2}

    def test_a_second_branch_wholly_beyond_the_limit_makes_no_row(self):
        far = call("far", [*MAIN, 11, 12, 3, 3, 3], [60])
        result = build(A, B, far, limits=Limits(2, 4))
        assert lines(result) == [("a", "b")]
        assert result.report.untrained == {"response_over_limit": 1}


def test_reports_add_up():
    total = total_report(
        [
            BuildReport(2, 10, 5, splits={"other": 1}, untrained={"cut": 1}),
            BuildReport(3, 20, 10, splits={"other": 2, "template": 1}, dropped={"prompt_over_limit": 1}),
        ]
    )
    assert total == BuildReport(5, 30, 15, {"other": 3, "template": 1}, {"cut": 1}, {"prompt_over_limit": 1})
    assert total.trained_share == 0.5


def test_samples_share_no_memory_with_the_calls():
    recorded = rollout(A, B)
    (sample,) = build_samples(recorded, WIDE).samples
    for source in recorded.calls:
        assert not np.shares_memory(sample.ids, source.prompt_ids)
        assert not np.shares_memory(sample.ids, source.sampled_ids)
        assert not np.shares_memory(sample.logprobs, source.logprobs)
