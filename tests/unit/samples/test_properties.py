"""Properties over generated forests, and an independent reading of the rules: lists, strings of ids and every pair."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_runtime.calls import Call, RolloutCalls, Routing
from agl_runtime.samples.build import build_samples
from agl_runtime.samples.types import Limits
from fakes.token_calls import call, rollout

TOKEN = st.integers(0, 2)
"""So few ids that prefixes and equal traces also arise by accident."""


@st.composite
def recorded_rollouts(draw: st.DrawFn) -> RolloutCalls:
    calls: list[Call] = []
    for index in range(draw(st.integers(1, 9))):
        base: list[int] = []
        if calls and draw(st.integers(0, 4)):
            source = draw(st.sampled_from(calls))
            base = source.prompt_ids.tolist()
            if draw(st.integers(0, 3)):  # else it is a retry of the source
                base += source.sampled_ids.tolist()
        observed = draw(st.lists(TOKEN, max_size=2))
        link = draw(st.sampled_from([None, *(c.info.call_id for c in calls)]))
        trainable = draw(st.integers(0, 4)) > 0
        calls.append(
            call(
                f"c{index}",
                base + observed,
                draw(st.lists(TOKEN, max_size=3)),
                parent_id=link if draw(st.booleans()) else None,
                delivered=draw(st.booleans()),
                trainable=trainable,
                reason=None if trainable else "cut",
                kind=draw(st.sampled_from(["main", "main", "main", "auxiliary"])),
                committed=draw(st.integers(0, 9)) > 0,
            )
        )
    return rollout(*calls)


LIMITS = st.builds(Limits, st.integers(0, 6), st.integers(1, 8))


def naive(recorded: RolloutCalls, limits: Limits):
    """Rows as (call ids, ids, trained positions, truncated), and reasons by call, straight from the rules."""
    ordered = sorted(recorded.calls, key=lambda c: c.info.commit_seq)
    reasons: dict[str, str] = {}
    for c in ordered:
        if not c.info.committed:
            reasons[c.info.call_id] = c.info.reason or "not_committed"
        elif not len(c.prompt_ids):
            reasons[c.info.call_id] = c.info.reason or "no_prompt_ids"
        elif not len(c.sampled_ids):
            reasons[c.info.call_id] = c.info.reason or "empty_generation"
    placed = [c for c in ordered if c.info.call_id not in reasons]
    for c in placed:
        if not c.info.trainable:
            reasons[c.info.call_id] = "cut"
        elif c.info.kind == "auxiliary":
            reasons[c.info.call_id] = "auxiliary"

    def trace(c: Call) -> list[int]:
        return [*c.prompt_ids.tolist(), *c.sampled_ids.tolist()]

    parents: dict[str, Call | None] = {}
    continued: set[str] = set()
    ambiguous: set[str] = set()
    for place, c in enumerate(placed):
        prefixes = [e for e in placed[:place] if trace(e) == c.prompt_ids.tolist()[: len(trace(e))]]
        link = [e for e in placed[:place] if e.info.call_id == c.info.parent_id]
        continued.update(e.info.call_id for e in link)
        if link and link[0] in prefixes:
            parents[c.info.call_id] = link[0]
        elif prefixes:
            longest = max(len(trace(e)) for e in prefixes)
            best = [e for e in prefixes if len(trace(e)) == longest]
            delivered = [e for e in best if e.info.delivered]
            if len(best) > 1 and len(delivered) != 1:
                ambiguous.update(e.info.call_id for e in best)
            parents[c.info.call_id] = delivered[0] if len(delivered) == 1 else best[0]
        else:
            parents[c.info.call_id] = None
        if (parent := parents[c.info.call_id]) is not None:
            continued.add(parent.info.call_id)
    for call_id in sorted(ambiguous):
        reasons.setdefault(call_id, "ambiguous_parent")
    main = [c for c in placed if c.info.kind == "main"]
    for c in main:
        same = [
            e
            for e in main
            if parents[e.info.call_id] is parents[c.info.call_id] and e.prompt_ids.tolist() == c.prompt_ids.tolist()
        ]
        used = {e.info.call_id for e in same} & continued
        handed = {e.info.call_id for e in same if e.info.delivered}
        if len(same) == 1 or c.info.call_id in (used or handed):
            continue
        reasons.setdefault(c.info.call_id, "superseded" if used or handed else "unresolved_retry")

    def line(c: Call) -> list[Call]:
        parent = parents[c.info.call_id]
        return [*(line(parent) if parent is not None else []), c]

    useful = {e.info.call_id for c in placed if c.info.call_id not in reasons for e in line(c)}
    inner = {e.info.call_id for c in placed if c.info.call_id in useful for e in line(c)[:-1]}
    rows, done = [], set()
    for leaf in [c for c in placed if c.info.call_id in useful - inner]:
        path = line(leaf)
        first = len(path[0].prompt_ids)
        cut = first + limits.max_response_tokens
        positions = []
        for c in path:
            start = len(c.prompt_ids)
            if c.info.call_id in reasons or c.info.call_id in done:
                continue
            if first > limits.max_prompt_tokens:
                reasons[c.info.call_id] = "prompt_over_limit"
            elif start >= cut:
                reasons[c.info.call_id] = "response_over_limit"
            else:
                done.add(c.info.call_id)
                positions += [p for p in range(start, start + len(c.sampled_ids)) if p < cut]
        if positions:
            whole = trace(leaf)
            ids = tuple(c.info.call_id for c in path if len(c.prompt_ids) < min(cut, len(whole)))
            rows.append((ids, whole[:cut], positions, len(whole) > cut))
    return rows, reasons


@settings(max_examples=400, deadline=None)
@given(recorded_rollouts(), LIMITS)
def test_building_agrees_with_a_naive_reading_of_the_rules(recorded: RolloutCalls, limits: Limits):
    rows, reasons = naive(recorded, limits)
    result = build_samples(recorded, limits)
    built = [(s.call_ids, s.ids.tolist(), np.flatnonzero(s.mask).tolist(), s.truncated) for s in result.samples]
    assert built == rows
    assert result.report.untrained == Counter(reasons.values())


@settings(max_examples=200, deadline=None)
@given(recorded_rollouts(), LIMITS)
def test_side_arrays_stay_aligned_and_every_token_is_trained_at_most_once(recorded: RolloutCalls, limits: Limits):
    result = build_samples(recorded, limits)
    by_id = {c.info.call_id: c for c in recorded.calls}
    seen: set[tuple[str, int]] = set()
    for sample in result.samples:
        size = sample.ids.size
        assert sample.mask.any()
        assert (sample.mask.size, sample.logprobs.size, sample.updates.size) == (size, size, size)
        assert size <= sample.prompt_len + limits.max_response_tokens
        assert not sample.mask[: sample.prompt_len].any()
        sampled = np.zeros(size, bool)
        for call_id in sample.call_ids:
            source = by_id[call_id]
            start = source.prompt_ids.size
            stop = min(start + source.sampled_ids.size, size)
            sampled[start:stop] = True
            assert sample.ids[start:stop].tolist() == source.sampled_ids[: stop - start].tolist()
            assert sample.logprobs[start:stop].tolist() == source.logprobs[: stop - start].tolist()
            for place in range(start, stop):
                if sample.mask[place]:
                    assert (call_id, place) not in seen
                    seen.add((call_id, place))
        assert not (sample.mask & ~sampled).any()
        assert not sample.logprobs[~sampled].any()
        assert (sample.updates[~sampled] == -1).all()
    assert len(seen) == result.report.trained_tokens


@settings(max_examples=200, deadline=None)
@given(recorded_rollouts(), LIMITS)
def test_every_call_either_trains_or_is_counted_with_a_reason(recorded: RolloutCalls, limits: Limits):
    result = build_samples(recorded, limits)
    training = {
        call_id
        for s in result.samples
        for call_id in s.call_ids
        for c in recorded.calls
        if c.info.call_id == call_id and s.mask[c.prompt_ids.size : c.prompt_ids.size + c.sampled_ids.size].any()
    }
    assert len(training) + sum(result.report.untrained.values()) == result.report.calls == len(recorded.calls)


@settings(max_examples=100, deadline=None)
@given(recorded_rollouts(), LIMITS, st.randoms(use_true_random=False))
def test_the_order_of_the_calls_does_not_matter_and_the_input_stays_as_it_was(
    recorded: RolloutCalls, limits: Limits, rng: random.Random
):
    shuffled = list(recorded.calls)
    rng.shuffle(shuffled)
    before = [(c.prompt_ids.tobytes(), c.sampled_ids.tobytes(), c.logprobs.tobytes()) for c in recorded.calls]
    one = build_samples(recorded, limits, decode=str)
    two = build_samples(replace(recorded, calls=tuple(shuffled)), limits, decode=str)
    assert one.report == two.report
    assert [(s.call_ids, s.ids.tolist(), s.mask.tolist(), s.split) for s in one.samples] == [
        (s.call_ids, s.ids.tolist(), s.mask.tolist(), s.split) for s in two.samples
    ]
    assert before == [(c.prompt_ids.tobytes(), c.sampled_ids.tobytes(), c.logprobs.tobytes()) for c in recorded.calls]


@settings(max_examples=100, deadline=None)
@given(recorded_rollouts(), LIMITS)
def test_routing_stands_beside_the_tokens_that_it_was_recorded_for(recorded: RolloutCalls, limits: Limits):
    """Recorded by a model whose experts tell the token and the place, at each call for the whole trace."""

    def experts(ids: np.ndarray) -> np.ndarray:
        return np.stack([ids, np.arange(ids.size)], 1).reshape(-1, 1, 2).astype(np.uint8)

    def traced(c: Call) -> Call:
        ids = np.concatenate([c.prompt_ids, c.sampled_ids])
        odd = int(c.info.call_id[1:]) % 3 == 0
        return replace(c, routing=None if odd or not ids.size else Routing(0, experts(ids)[:-1]))

    for sample in build_samples(replace(recorded, calls=tuple(map(traced, recorded.calls))), limits).samples:
        if int(sample.call_ids[-1][1:]) % 3 == 0 and not sample.truncated:
            assert sample.routed is None
        if sample.routed is not None:
            assert len(sample.routed) == sample.ids.size
            known = sample.ids.size if sample.truncated else sample.ids.size - 1
            assert sample.routed[:known].tolist() == experts(sample.ids)[:known].tolist()
            assert not sample.routed[known:].any()
