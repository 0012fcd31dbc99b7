"""Intervals of a few runs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


def test_the_interval_is_students(bench: Callable[[str], ModuleType]) -> None:
    intervals: Any = bench("support.intervals")
    # Standard deviation 1, two degrees of freedom: 4.303 / sqrt(3).
    assert intervals.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.4843), abs=1e-3)
    assert intervals.shown([1.0, 1.0]) == "1.000 ± 0.000"
