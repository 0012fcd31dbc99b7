from __future__ import annotations

import pytest

from agl_runtime.store.delivery import settle


@pytest.mark.parametrize(
    ("delivered", "continued", "retried", "outcome"),
    [
        (True, False, False, (True, None)),
        (False, True, False, (True, None)),
        (True, True, True, (True, None)),
        (True, False, True, (True, None)),
        (False, True, True, (True, None)),
        (False, False, False, (False, "undelivered")),
        (False, False, True, (False, "superseded")),
    ],
)
def test_a_trainable_call_counts_when_the_agent_had_it(
    delivered: bool, continued: bool, retried: bool, outcome: tuple[bool, str | None]
) -> None:
    assert settle(True, None, delivered=delivered, continued=continued, retried=retried) == outcome


@pytest.mark.parametrize("fact", [False, True])
def test_an_untrainable_call_keeps_its_own_reason(fact: bool) -> None:
    assert settle(False, "cut", delivered=fact, continued=fact, retried=fact) == (False, "cut")
