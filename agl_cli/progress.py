"""Progress of a run in words: one line a finished step or validation, and a few lines of what happens now.

The texts are pure functions of metrics rows and part states. On a terminal the present state is redrawn in place below
the lines of the steps; elsewhere only finished steps, validations and changes of phase are written. All goes to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from agl_cli import diagnostics
from agl_runtime.schemas import PartStatus
from agl_runtime.trainer.metrics import tokens_per_s

UNTOLD_PHASES = ("sampling", "updating", "saving", "done")  # told by the line of their step, or of the end
BARS = "▁▂▃▄▅▆▇█"
BAR_WIDTH = 40
Row = Mapping[str, Any]


def row_line(row: Row, steps: int | None = None) -> str | None:
    """A metrics row as one line; None for a kind that is not shown."""
    if row.get("kind") == "validation":
        return (
            f"validation at step {row['step']}: {pass_at_1(row)}, reward {row['reward_mean']:.2f}, "
            f"{row['rollouts']} rollouts in {row['seconds']:.0f} s{_agents_failed(row)}"
        )
    if row.get("kind") != "step":
        return None
    head = f"step {row['step']}{f'/{steps}' if steps else ''}"
    if row.get("skipped"):
        return f"{head}  reward {_number(row['reward_mean'], '.2f')}  skipped: {row['skipped']}{_agents_failed(row)}"
    without = f" ({row['groups_without_spread']} without spread)" if row["groups_without_spread"] else ""
    failed = f" ({row['failed']} failed)" if row["failed"] else ""
    return "  ".join(
        (
            head,
            f"reward {_number(row['reward_mean'], '.2f')} ± {_number(row['reward_std'], '.2f')}",
            f"{row['groups']} groups{without}",
            f"{row['rollouts']} rollouts{failed}",
            f"{_number(tokens_per_s(row), '.0f')} tokens/s",
            f"{_number(row['agent_cpu_s'], '.2f')} CPU s and {_number(row['agent_rss_mb'], '.0f')} MB an agent",
            f"update {_number(row['update_s'], '.2f')} s{_age(row)}{_agents_failed(row)}",
        )
    )


def _age(row: Row) -> str:
    """Of the groups of an asynchronous step; nothing where none is old."""
    if not row.get("staleness_max") and not row.get("groups_dropped"):
        return ""
    dropped = f", {row['groups_dropped']} groups dropped as too stale" if row["groups_dropped"] else ""
    return f"  staleness {row['staleness_mean']:.1f}, at most {row['staleness_max']}{dropped}"


def _agents_failed(row: Row) -> str:
    failed = row.get("agents_failed")
    return f"  {failed} of {row['rollouts']} agents failed, most often: {row['agent_error']}" if failed else ""


def pass_at_1(value: Row) -> str:
    """pass@1 with its 95 % confidence interval."""
    return f"pass@1 {value['pass_at_1']:.3f} ({value['ci_low']:.3f} to {value['ci_high']:.3f})"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def state_line(parts: Sequence[PartStatus]) -> str:
    """What the trainer does, what it waits for, and the agents at work, in one line."""
    by_name = {part.part: part for part in parts}
    trainer, controller = by_name.get("trainer"), by_name.get("controller")
    if trainer is None:
        return "waiting for the trainer to start"
    detail = trainer.detail
    words = [f"step {detail['step']}/{detail['steps']}"] if detail.get("steps") else []
    words.append(str(detail.get("phase") or trainer.state))
    if trainer.waiting_for:
        words.append(f"waiting for {trainer.waiting_for}")
    elif detail.get("groups_total"):
        words.append(f"{detail['groups_done']} of {detail['groups_total']} groups")
    if detail.get("reward") is not None:
        words.append(f"reward {detail['reward']:.2f}")
    if detail.get("tokens_per_s") is not None:
        words.append(f"{detail['tokens_per_s']:.0f} tokens/s")
    if controller is not None and "running" in controller.detail:
        words.append(f"{controller.detail['running']} of {controller.detail.get('limit', '?')} agents at work")
    return " · ".join(words)


def curve(rewards: Sequence[float], width: int = 60) -> str:
    """The last rewards as a line of bars, from the lowest to the highest among them."""
    shown = rewards[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((reward - low) * scale)] for reward in shown)


def bar(value: float) -> str:
    """A reward between 0 and 1 as a bar."""
    return "█" * round(min(max(value, 0.0), 1.0) * BAR_WIDTH)


class Display(Protocol):
    """`row` is called for each new metrics row, `state` about every second, `say` for anything else worth a line."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def row(self, row: Row) -> None: ...
    def state(self, parts: Sequence[PartStatus]) -> None: ...
    def say(self, text: str) -> None: ...


class PlainDisplay:
    """Lines for logs and pipes: no redrawing, and the present state only where the phase changes."""

    def __init__(self, steps: int | None = None) -> None:
        self._steps = steps
        self._phase: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def row(self, row: Row) -> None:
        if (line := row_line(row, self._steps)) is not None:
            self.say(line)

    def state(self, parts: Sequence[PartStatus]) -> None:
        trainer = next((part for part in parts if part.part == "trainer"), None)
        phase = str(trainer.detail.get("phase") or trainer.state) if trainer else None
        if phase not in (None, self._phase, *UNTOLD_PHASES):
            self.say(state_line(parts))
        self._phase = phase or self._phase

    def say(self, text: str) -> None:
        diagnostics.note(text)


class LiveDisplay:
    """Redraws the present state at the bottom of a terminal."""

    def __init__(self, steps: int | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._steps = steps
        self._rewards: list[float] = []
        self._live = Live(console=Console(stderr=True, highlight=False), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def row(self, row: Row) -> None:
        if row.get("kind") == "step" and row.get("reward_mean") is not None:
            self._rewards.append(row["reward_mean"])
        if (line := row_line(row, self._steps)) is not None:
            self.say(line)

    def state(self, parts: Sequence[PartStatus]) -> None:
        from rich.text import Text

        bars = f"\n{curve(self._rewards)}  reward by step" if len(self._rewards) > 1 else ""
        self._live.update(Text(state_line(parts) + bars), refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False)


def make_display(steps: int | None = None) -> Display:
    return LiveDisplay(steps) if sys.stderr.isatty() else PlainDisplay(steps)
