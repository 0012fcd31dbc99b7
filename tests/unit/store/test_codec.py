"""Bodies come back equal whatever they hold, and cost what is new in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_runtime.errors import StoreError
from agl_runtime.store import codec

characters = st.characters() | st.sampled_from("\0\ud800\\u")
texts = st.text(characters, max_size=8) | st.sampled_from(
    ["\0", "\0\0", "x" * 600, "data:image/png;base64," + "A" * 700]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)
long_parts = st.integers(0, 3000).map(lambda n: "abcdefg" * n)
id_lists = st.integers(0, 700).map(lambda n: list(range(n)))
bodies = st.dictionaries(
    st.sampled_from(["messages", "prompt", "input", "model", "tools", "\0"]), values | long_parts | id_lists, max_size=5
)


def same(a: Any, b: Any) -> bool:
    """Equal in type and key order too, which `==` forgives (1 == 1.0 == True)."""
    return repr(a) == repr(b)


class Chain:
    """Bodies stored one after the other, as one attempt's calls are."""

    def __init__(self) -> None:
        self.blobs: codec.Blobs = {}
        self.records: dict[str, codec.Encoded] = {}

    def add(self, body: dict[str, Any]) -> codec.Encoded:
        encoded = codec.encode(body, {name: item.outline for name, item in self.records.items()})
        self.blobs.update(encoded.blobs)
        self.records[str(len(self.records))] = encoded
        return encoded

    def read(self) -> list[dict[str, Any]]:
        decoded: dict[str, codec.Decoded] = {}
        for name, item in self.records.items():
            base = decoded.get(item.base_id or "")
            decoded[name] = codec.decode(item.record, item.digest, base, self.blobs.__getitem__)
        return [item.body for item in decoded.values()]


@settings(deadline=None)
@given(values)
def test_any_json_value_comes_back_from_its_text(value: Any) -> None:
    blobs: codec.Blobs = {}
    assert same(codec.unpack(codec.pack(value, blobs), blobs.__getitem__), value)


@settings(deadline=None)
@given(st.lists(bodies, max_size=5))
def test_any_bodies_come_back_from_their_records(chain_of_bodies: list[dict[str, Any]]) -> None:
    chain = Chain()
    for body in chain_of_bodies:
        chain.add(body)
    assert same(chain.read(), chain_of_bodies)


@settings(deadline=None)
@given(bodies, st.sampled_from(["messages", "prompt"]), st.lists(values, max_size=3))
def test_a_body_that_extends_another_comes_back(body: dict[str, Any], key: str, more: list[Any]) -> None:
    chain = Chain()
    start = body.get(key)
    longer = start + "tail" if isinstance(start, str) else [*(start if isinstance(start, list) else []), *more]
    chain.add(body)
    chain.add({**body, key: longer})
    assert same(chain.read(), [body, {**body, key: longer}])


@settings(deadline=None)
@given(st.lists(bodies, max_size=5))
def test_outlines_are_read_from_records_alone(chain_of_bodies: list[dict[str, Any]]) -> None:
    chain = Chain()
    outlines: dict[str | None, codec.Outline] = {}
    for name, body in enumerate(chain_of_bodies):
        encoded = chain.add(body)
        outlines[str(name)] = codec.outline_of(encoded.record, outlines.get(encoded.base_id))
        assert outlines[str(name)] == encoded.outline


@pytest.mark.parametrize(
    ("key", "whole", "more"),
    [
        ("messages", [{"role": "user", "content": f"turn {i} " + "w" * 50} for i in range(200)], [{"role": "tool"}]),
        ("input", [{"type": "message", "text": f"turn {i} " + "w" * 50} for i in range(200)], [{"type": "x"}]),
        ("prompt", "".join(f"line {i}\n" for i in range(3000)), "one more\n"),
        ("prompt", list(range(10_000)), [1, 2, 3]),
    ],
    ids=["chat", "responses", "completions text", "completions ids"],
)
def test_a_turn_costs_what_is_new_in_it(key: str, whole: Any, more: Any) -> None:
    chain = Chain()
    tools = [{"name": f"tool{i}", "description": "d" * 100} for i in range(20)]
    chain.add({"model": "m", key: whole, "tools": tools})
    second = chain.add({"model": "m", key: whole + more, "tools": tools})
    assert second.base_id == "0"
    assert len(second.record) + sum(map(len, second.blobs.values())) < 2500


def test_equal_content_is_stored_once() -> None:
    image = "data:image/png;base64," + "A" * 5000
    tools = [{"name": f"tool{i}", "description": "d" * 100} for i in range(20)]
    chain = Chain()
    chain.add({"tools": tools, "messages": [image, {"url": image}]})
    chain.add({"title": True, "tools": list(reversed(tools)), "messages": ["other", {"deep": [image]}]})
    again = Chain()
    again.add({"messages": ["third", image], "tools": tools})
    assert sum(content == image.encode() for content in chain.blobs.values()) == 1
    assert set(again.blobs) <= set(chain.blobs)


def test_the_base_is_the_body_that_shares_most() -> None:
    chain = Chain()
    chain.add({"model": "m", "messages": ["main", "a", "b"]})
    chain.add({"model": "m", "messages": ["title"]})
    assert chain.add({"model": "m", "messages": ["main", "a", "b", "c"]}).base_id == "0"
    assert chain.add({"model": "m", "messages": ["title", "x"]}).base_id == "1"
    assert chain.add({"other": 1}).base_id is None


def test_covers_tells_whether_an_outline_can_be_forgotten() -> None:
    old, longer, other = (
        codec.encode({"model": "m", "messages": messages}, {}).outline for messages in (["a"], ["a", "b"], ["x", "b"])
    )
    assert codec.covers(longer, old)
    assert not codec.covers(old, longer)
    assert not codec.covers(other, old)


def test_a_wrong_base_is_noticed() -> None:
    chain = Chain()
    chain.add({"messages": ["a", "b"]})
    second = chain.add({"messages": ["a", "b", "c"]})
    wrong = codec.Decoded({"messages": ["a", "X"]}, codec.encode({"messages": ["a", "X"]}, {}).outline)
    for base in (wrong, None):
        with pytest.raises(StoreError, match=r"A stored request does not match its digest\. Restore the store file\."):
            codec.decode(second.record, second.digest, base, chain.blobs.__getitem__)


def test_damaged_and_missing_content_is_noticed() -> None:
    blobs: codec.Blobs = {}
    text = codec.pack("x" * 1000, blobs)
    with pytest.raises(StoreError, match=r"The stored content \w+ does not match its digest"):
        codec.unpack(text, lambda digest: codec.checked(digest, b"y" * 1000))
    with pytest.raises(StoreError, match=r"The store lacks the content \w+\. Restore the store file\."):
        codec.unpack(text, lambda digest: codec.checked(digest, None))


def test_what_json_cannot_express_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, {"x": object()}, {"x": b"bytes"}):
        with pytest.raises(StoreError, match=r"cannot be stored as JSON .* Send plain JSON values, less nested\."):
            codec.encode({"messages": value}, {})
