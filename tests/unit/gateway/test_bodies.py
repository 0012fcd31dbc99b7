from __future__ import annotations

from json import JSONDecodeError

import pytest

from agl_runtime.gateway.bodies import load


def test_plain_json_is_read() -> None:
    assert load(b'{"a": [1, 2.5, null, "\xc3\xa9"]}') == {"a": [1, 2.5, None, "é"]}


@pytest.mark.parametrize(
    "raw",
    [b"{", b"NaN", b"[Infinity]", b'"\\ud800"', b"\xff", b"1" * 400, b"[" * 230 + b"]" * 230, b"[" * 100_000],
)
def test_what_could_not_be_kept_and_told_again_is_refused(raw: bytes) -> None:
    with pytest.raises(JSONDecodeError):
        load(raw)


def test_nesting_that_leaves_room_around_it_is_read() -> None:
    assert load(b"[" * 200 + b"]" * 200) is not None
