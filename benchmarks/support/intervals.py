"""Means of a few independent runs with 95 % intervals (Student's t)."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

# The 0.975 quantile of Student's t with 1, 2, .. degrees of freedom.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
MOST = len(T) + 1


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of 2 to `MOST` values and half the width of its interval."""
    return fmean(values), T[len(values) - 2] * stdev(values) / sqrt(len(values))


def shown(values: Sequence[float]) -> str:
    mean, half = interval(values)
    return f"{mean:.3f} ± {half:.3f}"
