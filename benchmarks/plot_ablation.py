"""Draws what bench_ablation.py printed: reward, entropy and gradient variance by step, a row of panels for each rate.

Lines are means over seeds, bands their 95 % intervals. Needs matplotlib (`pip install --group bench`). The same figures
give the same file.

    python benchmarks/bench_ablation.py | tail -1 > ablation.json
    python benchmarks/plot_ablation.py ablation.json docs/ablation.svg
"""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

LOOK = {
    "sample": ("#b8500f", "-", "advantage by sample"),
    "rollout": ("#6a3d9a", "--", "advantage by rollout"),
    "both": ("#1f6f3f", "-.", "advantage and loss by rollout"),
}
PANELS = {
    "reward": "reward of the training rollouts",
    "entropy": "policy entropy, nats a token",
    "variance": "relative variance of the gradient",
}
WIDEST = 1.0  # Half an interval: a point of two or three seeds that says less than the panel is high is left out.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "ablation", "font.size": 9, "path.simplify": True}


def panel(axes: Axes, arms: dict[str, list[list[float] | None]]) -> None:
    for name, points in arms.items():
        colour, dash, label = LOOK[name]
        known = [(step, *point) for step, point in enumerate(points) if point is not None and point[1] < WIDEST]
        steps, means, halves = zip(*known, strict=True)
        low = [mean - half for mean, half in zip(means, halves, strict=True)]
        high = [mean + half for mean, half in zip(means, halves, strict=True)]
        axes.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)
        axes.plot(steps, means, color=colour, linestyle=dash, linewidth=1.4, label=label)
    axes.locator_params(axis="both", nbins=5)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw(result: dict[str, Any]) -> Figure:
    rates = result["rates"]
    size = (10.5, 0.7 + 2.3 * len(rates))
    figure, grid = pyplot.subplots(len(rates), len(PANELS), figsize=size, squeeze=False, sharex=True, sharey="col")
    for row, (rate, found) in zip(grid, rates.items(), strict=True):
        for axes, name in zip(row, PANELS, strict=True):
            panel(axes, found["curves"][name])
        row[0].set_ylabel(f"learning rate {rate}")
    for axes, title in zip(grid[0], PANELS.values(), strict=True):
        axes.set_title(title, fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("step")
    grid[0][0].set_ylim(0, 1.05)
    grid[0][1].set_ylim(bottom=0)
    grid[0][2].set_ylim(0, 1.5)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(LOOK), frameon=False)
    figure.tight_layout(rect=(0, 0.35 / size[1], 1, 1))
    return figure


def as_svg(figure: Figure) -> str:
    """With two decimals, which are enough for points on a page and halve the file."""
    page = io.StringIO()
    figure.savefig(page, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    rounded = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", page.getvalue())
    return re.sub(r" +$", "", rounded, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    with matplotlib.rc_context(STYLE):
        figure = draw(json.loads(args.result.read_text(encoding="utf-8")))
        args.picture.write_text(as_svg(figure), encoding="utf-8")


if __name__ == "__main__":
    main()
