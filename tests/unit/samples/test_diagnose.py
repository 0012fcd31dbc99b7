from __future__ import annotations

from collections.abc import Sequence

import pytest

from agl_runtime.calls import Call
from agl_runtime.samples.build import build_samples
from agl_runtime.samples.diagnose import diagnose
from agl_runtime.samples.types import Break, Limits
from fakes.token_calls import call, rollout, untrainable


class Pieces:
    """A tokenizer whose tokens are the pieces it was shown."""

    def __init__(self) -> None:
        self.known: list[str] = []

    def ids(self, *pieces: str) -> list[int]:
        self.known += [piece for piece in dict.fromkeys(pieces) if piece not in self.known]
        return [self.known.index(piece) for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        raw = b"".join(self.known[i].encode("utf-8", "surrogateescape") for i in ids)
        return raw.decode("utf-8", "replace")


P = Pieces()
END = ("<end>", "\n", "<user>")
ASK = ("<sys>", "be", " kind", "<user>", "what", " is", " it", "?", "<bot>")


def first(*answer: str) -> Call:
    return call("a", P.ids(*ASK), P.ids(*answer))


def verdict(earlier: Call | Sequence[Call], *prompt: str) -> str:
    line = [earlier] if isinstance(earlier, Call) else earlier
    return diagnose(call("new", P.ids(*prompt), P.ids("x")), line, P.decode).cause


def test_the_same_text_in_other_ids_is_retokenized():
    assert verdict(first("hel", "lo", "<end>"), *ASK, "hello", *END, "go") == "retokenized"
    assert verdict(first("hello", "<end>"), *ASK, "he", "l", "lo", *END, "go") == "retokenized"


def test_a_character_that_the_window_cuts_does_not_hide_equal_text():
    halves = [b"\xc3".decode("utf-8", "surrogateescape"), b"\xa9".decode("utf-8", "surrogateescape")]
    assert verdict(first("a", "b", "c", *halves * 40, "<end>"), *ASK, "abc", *["é"] * 40, "<end>") == "retokenized"


@pytest.mark.parametrize("kept", [("hi",), ("hi", " "), ("\n", "hi")])
def test_the_same_text_but_for_white_space_is_trimmed(kept: tuple[str, ...]):
    assert verdict(first("hi", "\n\n", "<end>"), *ASK, *kept, *END, "go") == "trimmed"


def test_white_space_trimmed_at_the_very_end_of_the_trace_is_trimmed():
    assert verdict(first("hi", "\n\n"), *ASK, "hi", *END, "go") == "trimmed"


def test_dropped_reasoning_is_a_rewritten_template():
    thought = first("<think>", "hm", " well", "</think>", "fine", "<end>")
    assert verdict(thought, *ASK, "fine", *END, "go") == "template"


def test_reasoning_dropped_from_an_earlier_turn_is_a_rewritten_template():
    a = first("<think>", "hm", "</think>", "fine", "<end>")
    turn = ("\n", "<user>", "more", " and", " more", " words", " here", "<bot>")
    b = call("b", P.ids(*ASK, "<think>", "hm", "</think>", "fine", "<end>", *turn), P.ids("ok", "<end>"))
    assert verdict([a, b], *ASK, "fine", "<end>", *turn, "ok", *END, "go") == "template"


def test_text_put_into_the_history_is_a_rewritten_template():
    a = call("a", P.ids(*ASK), P.ids("fine", "<end>"))
    b = call("b", P.ids(*ASK, "fine", *END, "one", " two", "<bot>"), P.ids("three", " four", " five", "<end>"))
    assert verdict(
        [a, b], *ASK, "fine", *END, "note", "!", "one", " two", "<bot>", "three", " four", " five", "<end>"
    ) == ("template")


def test_a_clock_in_the_system_prompt_is_a_rewritten_template():
    at_nine = ("<sys>", "it is ", "9", "<user>", "what", " is", " it", "?", "<bot>")
    at_ten = ("<sys>", "it is ", "10", "<user>", "what", " is", " it", "?", "<bot>")
    answer = ("this", " is", " one", " whole", " long", " answer", "!", "<end>")
    assert verdict(call("a", P.ids(*at_nine), P.ids(*answer)), *at_ten, *answer, "\n", "<user>", "go") == "template"
    assert verdict(call("a", P.ids(*at_nine), P.ids(*answer)), *at_ten, "no", "<end>", "\n", "<user>", "go") == "other"


def test_a_changed_answer_is_a_rewritten_template():
    assert verdict(first("call", "(", "1", ")", "<end>"), *ASK, "invoke", "[", "1", "]", *END) == "template"


def test_a_history_without_its_oldest_turns_is_truncated():
    one = ("<user>", "first", " words", " are", " long", " gone", "<bot>")
    two = ("<user>", "then", " came", " some", " more", " words", " of", " mine", "<bot>")
    a = call("a", P.ids("<sys>", *one), P.ids("yes", "<end>"))
    b = call("b", P.ids("<sys>", *one, "yes", "<end>", *two), P.ids("no", "<end>"))
    assert verdict([a, b], "<sys>", *two, "no", "<end>", "<user>", "go") == "truncated"


def test_turns_cut_out_behind_the_first_words_of_an_answer_are_truncated():
    one = ("<user>", "first", "<bot>")
    two = ("<user>", "then", "<bot>")
    long = ("the", " same", " beginning")
    rest = (" here", " are", " five", " more", " words", "<end>")
    a = call("a", P.ids("<sys>", *one), P.ids(*long, " gone", "<end>"))
    b = call("b", P.ids("<sys>", *one, *long, " gone", "<end>", *two), P.ids(*long, *rest))
    assert verdict([a, b], "<sys>", *one, *long, *rest) == "truncated"


def test_a_prompt_that_ends_inside_the_trace_is_truncated():
    assert verdict(first("fine", " then", "<end>"), *ASK, "fine") == "truncated"
    assert verdict(first("fine", "<end>"), *ASK[:4]) == "truncated"


def test_a_history_that_goes_on_without_the_answer_is_omitted():
    answer = first("no", " command", " in", " this", " one", " answer", " at", " all", "<end>")
    asked_again = (*ASK[:-1], "<user>", "please", " give", " one", "<bot>")
    assert verdict(answer, *asked_again) == "omitted"
    second = call("b", P.ids(*asked_again), P.ids("still", " none", " of", " it", " in", " this", " one", "<end>"))
    assert verdict(second, *asked_again[:-1], "<user>", "and", " again", "<bot>") == "omitted"


def test_the_words_around_the_first_difference_are_told():
    found = diagnose(call("new", P.ids(*ASK, "no", *END), P.ids("x")), [first("yes", "<end>")], P.decode)
    assert found == Break("template", "new", "a", "be kind<user>what is it?<bot>", "yes<end>", "no<end>\n<user>")


def test_another_conversation_is_other():
    assert verdict(first("fine", "<end>"), "<sys>", "you", " sum", " up", "<user>", "text", "<bot>") == "other"
    assert verdict(first("fine", "<end>"), "nothing", " shared") == "other"


class TestInBuilding:
    """Which trace a new row is compared with, and what is counted."""

    def splits(self, *calls: Call) -> tuple[list[str | None], dict[str, int]]:
        result = build_samples(rollout(*calls), Limits(1000, 1000), P.decode)
        return [sample.split for sample in result.samples], result.report.splits

    A = first("hel", "lo", "<end>")
    BROKEN = call("b", P.ids(*ASK, "hello", *END, "go", "<bot>"), P.ids("y", "<end>"))

    def test_a_broken_continuation_names_its_cause_on_the_row_and_in_the_report(self):
        assert self.splits(self.A, self.BROKEN) == ([None, "retokenized"], {"retokenized": 1})

    def test_calls_that_continue_are_no_split(self):
        b = call("b", P.ids(*ASK, "hel", "lo", *END, "go", "<bot>"), P.ids("y", "<end>"))
        assert self.splits(self.A, b) == ([None], {})

    def test_the_trace_that_shares_most_is_compared_whatever_stands_in_between(self):
        sub = call("sub", P.ids("<sys>", "you", " sum"), P.ids("z"))
        assert self.splits(self.A, sub, self.BROKEN) == ([None, "other", "retokenized"], {"other": 1, "retokenized": 1})

    def test_a_recorded_link_decides_what_is_compared(self):
        close = call("close", P.ids(*ASK, "hello", *END, "go", "<tool>"), P.ids("z"))
        linked = call("b", P.ids(*ASK, "hello", *END, "go", "<bot>"), P.ids("y"), parent_id="a")
        assert self.splits(self.A, close, linked) == ([None, "retokenized", "retokenized"], {"retokenized": 2})

    def test_a_break_further_down_a_line_is_seen_though_the_call_has_a_parent(self):
        b = call("b", P.ids(*ASK, "hel", "lo", *END, "go", "<bot>"), P.ids("hel", "lo", "<end>"))
        c = call("c", P.ids(*ASK, "hel", "lo", *END, "go", "<bot>", "hello", *END, "on", "<bot>"), P.ids("y"))
        result = build_samples(rollout(self.A, b, c), Limits(1000, 1000), P.decode)
        assert [(s.call_ids, s.split) for s in result.samples] == [(("a", "b"), None), (("a", "c"), "retokenized")]

    def test_a_recorded_branch_and_a_retry_are_no_splits(self):
        b = call("b", P.ids(*ASK, "hel", "lo", *END, "go", "<bot>"), P.ids("y"), parent_id="a")
        branch = call("branch", P.ids(*ASK, "hel", "lo", *END, "stay", "<bot>"), P.ids("z"), parent_id="a")
        retry = call("retry", P.ids(*ASK, "hel", "lo", *END, "stay", "<bot>"), P.ids("w"), delivered=False)
        assert self.splits(self.A, b, branch, retry) == ([None, None], {})

    def test_two_retries_that_both_went_on_are_no_split(self):
        twin = call("twin", P.ids(*ASK), P.ids("hi", "<end>"))
        b = call("b", P.ids(*ASK, "hel", "lo", *END, "go", "<bot>"), P.ids("y"))
        c = call("c", P.ids(*ASK, "hi", *END, "go", "<bot>"), P.ids("z"))
        assert self.splits(self.A, twin, b, c) == ([None, None], {})

    def test_a_trace_that_goes_on_only_later_is_still_compared(self):
        b = call("late", P.ids(*ASK, "hel", "lo", *END, "go", "<bot>"), P.ids("y"))
        assert self.splits(self.A, self.BROKEN, b) == (["retokenized", None], {"retokenized": 1})

    def test_titles_and_rows_that_train_nothing_are_no_splits(self):
        title = untrainable("t", P.ids("<sys>", "name", " it"), P.ids("z"), "auxiliary", kind="auxiliary")
        lost = untrainable("lost", P.ids("<sys>", "you", " sum"), P.ids("z"), "cut")
        assert self.splits(title, lost, self.A) == (["other"], {"other": 1})
        assert self.splits(title, self.A) == ([None], {})
        assert self.splits(self.A, lost) == ([None], {})
        follows_title = call("f", P.ids("<sys>", "name", " it", "z", "on"), P.ids("z"))
        assert self.splits(self.A, title, follows_title) == ([None, None], {})

    def test_without_a_decoder_the_cause_stays_open(self):
        result = build_samples(rollout(self.A, self.BROKEN), Limits(1000, 1000))
        assert result.report.splits == {"undiagnosed": 1}
