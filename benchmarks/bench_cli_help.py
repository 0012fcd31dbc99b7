"""What `agl --help` costs beside a bare two-command Typer app, each as a whole process, alternating in one run.

Prints a table, then one JSON object. The bare app is measured twice: as Typer comes (help drawn by rich) and with plain
help like agl's. The figure of a program is the median of its wall times.

    python benchmarks/bench_cli_help.py [--runs 15]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

BARE = """
import typer
app = typer.Typer({options})

@app.command()
def one(name: str = "x") -> None:
    "The first command."

@app.command()
def two(count: int = 1) -> None:
    "The second command."

app()
"""
PROGRAMS = {
    "bare Typer": [sys.executable, "-c", BARE.format(options="")],
    "bare Typer, plain help": [sys.executable, "-c", BARE.format(options="rich_markup_mode=None")],
    "agl": [sys.executable, "-m", "agl_cli.main"],
}
LIMIT_S = 0.1


def wall_s(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([*command, "--help"], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    for command in PROGRAMS.values():
        wall_s(command)  # byte code and page cache
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(runs):
        for name, command in PROGRAMS.items():
            times[name].append(wall_s(command))
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"{'program':<24} {'median s':>9} {'fastest s':>10} {'slowest s':>10}")
    for name, values in times.items():
        print(f"{name:<24} {median[name]:>9.3f} {min(values):>10.3f} {max(values):>10.3f}")
    extra_s = {name: round(median["agl"] - median[name], 4) for name in PROGRAMS if name != "agl"}
    result = {
        "benchmark": "cli_help",
        "runs": runs,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "median_s": {name: round(value, 4) for name, value in median.items()},
        "agl_extra_s": extra_s,
        "limit_s": LIMIT_S,
        "within_limit": max(extra_s.values()) <= LIMIT_S,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
