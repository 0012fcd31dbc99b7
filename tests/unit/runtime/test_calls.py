from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime import calls
from agl_runtime.calls import CallInfo, PackedCall, VersionSpan, common_prefix, make_delta, new_routing
from agl_runtime.errors import StoreError
from agl_runtime.schemas import PolicyVersion

ids = st.lists(st.integers(0, 5), max_size=12).map(calls.ids_array)


def info(name: str, seq: int) -> CallInfo:
    return CallInfo(name, "r", "0", seq, "chat", committed=True, commit_seq=seq, trainable=True)


def packed(turns: list[tuple[calls.Ids, calls.Ids]]) -> list[PackedCall]:
    """Each turn is (prompt, sampled); each builds on the one before it."""
    out: list[PackedCall] = []
    base: tuple[str, calls.Ids] | None = None
    for seq, (prompt, sampled) in enumerate(turns):
        delta = make_delta(prompt, base[0], common_prefix(prompt, base[1])) if base else make_delta(prompt, None, 0)
        spans = (VersionSpan(0, sampled.size, PolicyVersion(1, seq)),)
        logprobs = np.linspace(-1, 0, sampled.size, dtype=np.float32)
        out.append(PackedCall(info(str(seq), seq), delta, sampled, logprobs, spans))
        base = (str(seq), np.concatenate([prompt, sampled]))
    return out


@given(st.lists(st.tuples(ids, ids), max_size=6))
def test_calls_survive_the_wire_whole(turns: list[tuple[calls.Ids, calls.Ids]]) -> None:
    body = calls.encode("r", "0", packed(turns), reward=0.5, incomplete=["x"])
    back = calls.decode(body)
    assert (back.rollout_id, back.attempt_id, back.reward, back.incomplete) == ("r", "0", 0.5, ("x",))
    for seq, (call, (prompt, sampled)) in enumerate(zip(back.calls, turns, strict=True)):
        np.testing.assert_array_equal(call.prompt_ids, prompt)
        np.testing.assert_array_equal(call.sampled_ids, sampled)
        assert call.logprobs.dtype == np.float32
        assert call.info == info(str(seq), seq)
        assert call.spans[0].version == PolicyVersion(1, seq)


def test_a_conversation_costs_its_own_length() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50_000, 100).astype(np.int32)
    turns = []
    for _ in range(100):
        sampled = rng.integers(0, 50_000, 100).astype(np.int32)
        turns.append((prompt, sampled))
        prompt = np.concatenate([prompt, sampled, rng.integers(0, 50_000, 20).astype(np.int32)])
    body = calls.encode("r", "0", packed(turns), reward=None)
    bytes_of_tokens = 4 * (100 + 100 * 120) + 4 * 100 * 100  # ids once, log-probabilities of the sampled ones
    assert len(body) < 1.5 * bytes_of_tokens


def test_a_changed_prompt_is_found_by_its_digest() -> None:
    first, second = packed(
        [(calls.ids_array([1, 2]), calls.ids_array([3])), (calls.ids_array([1, 2, 3, 4]), calls.ids_array([5]))]
    )
    broken = dataclasses.replace(second, prompt=dataclasses.replace(second.prompt, tail=calls.ids_array([9])))
    with pytest.raises(StoreError, match="The prompt of call 1 does not match its digest"):
        calls.unpack([first, broken])
    with pytest.raises(StoreError, match="call 1 builds on call 0, which is missing"):
        calls.unpack([second])


def test_another_wire_version_is_refused() -> None:
    body = calls.encode("r", "0", [], reward=None).replace(b"\xa1v\x01", b"\xa1v\x02")
    with pytest.raises(StoreError, match="wire version 2; this agl reads 1"):
        calls.decode(body)


@given(ids, ids)
def test_common_prefix_is_the_longest(a: calls.Ids, b: calls.Ids) -> None:
    n = calls.common_prefix(a, b)
    assert list(a[:n]) == list(b[:n])
    assert n in (a.size, b.size) or a[n] != b[n]


def with_routing(turns: list[tuple[calls.Ids, calls.Ids]], most: int = 200) -> list[PackedCall]:
    """Each call as `packed` makes it, with the routing of its own tokens: two layers of two experts."""
    out = []
    for seq, (item, (prompt, sampled)) in enumerate(zip(packed(turns), turns, strict=True)):
        rng = np.random.default_rng(seq)
        routed = rng.integers(0, most, (prompt.size + sampled.size - 1, 2, 2)).astype(
            np.int16 if most > 255 else np.uint8
        )
        out.append(dataclasses.replace(item, routing=new_routing(routed, item.prompt, (2, 2))))
    return out


some_ids = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(calls.ids_array)


@given(st.lists(st.tuples(some_ids, some_ids), min_size=1, max_size=6), st.sampled_from([200, 300]))
def test_a_call_has_the_routing_that_was_recorded_first_for_each_token_of_its_trace(
    turns: list[tuple[calls.Ids, calls.Ids]], most: int
) -> None:
    sent = with_routing(turns, most)
    back = calls.decode(calls.encode("r", "0", sent, reward=None)).calls
    before = np.zeros((0, 2, 2))
    for item, call in zip(sent, back, strict=True):
        assert item.routing is not None
        assert call.routing is not None
        whole = call.routing.whole()
        assert whole.dtype == item.routing.tail.dtype
        shared = min(max(0, item.prompt.keep - 1), len(before))
        assert whole.tolist() == [*before[:shared].tolist(), *item.routing.tail.tolist()]
        assert len(whole) == call.prompt_ids.size + call.sampled_ids.size - 1
        before = whole


def test_a_call_that_goes_on_from_one_without_routing_or_with_another_shape_has_none() -> None:
    turns = [(calls.ids_array([1, 2]), calls.ids_array([3])), (calls.ids_array([1, 2, 3, 4]), calls.ids_array([5]))]
    first, second = with_routing(turns)
    assert first.routing is not None
    other = dataclasses.replace(first.routing, tail=first.routing.tail[:, :1])
    for routing in (None, other):
        unpacked = calls.unpack([dataclasses.replace(first, routing=routing), second])
        assert unpacked[1].routing is None
    assert calls.unpack([first, second])[1].routing is not None
