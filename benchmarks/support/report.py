"""How a benchmark says its figures: a table for a reader, then one JSON object."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def table(columns: Sequence[str], rows: Mapping[str, Sequence[float | str | None]]) -> None:
    """Rows by their names; a missing figure is a dash."""
    width = max(map(len, [*rows, columns[0]])) + 2
    print(f"{columns[0]:<{width}}" + "".join(f"{name:>16}" for name in columns[1:]))
    for name, values in rows.items():
        print(f"{name:<{width}}" + "".join(f"{_cell(value):>16}" for value in values))
    sys.stdout.flush()


def _cell(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def emit(benchmark: str, result: Mapping[str, Any], limits: Mapping[str, tuple[float, bool]]) -> None:
    """`limits` maps a bound's name to it and to whether it is met."""
    bounds = {name: {"limit": limit, "met": met} for name, (limit, met) in limits.items()}
    within = all(met for _, met in limits.values())
    whole = {"benchmark": benchmark, "machine": machine(), **result, "bounds": bounds, "within_limit": within}
    print(json.dumps(rounded(whole)))


def rounded(value: Any) -> Any:
    """Floats to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value
