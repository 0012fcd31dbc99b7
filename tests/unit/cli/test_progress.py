from __future__ import annotations

import sys
from typing import Any

import pytest

from agl_cli.progress import LiveDisplay, PlainDisplay, curve, make_display, row_line, state_line
from agl_runtime.schemas import PartStatus

STEP: dict[str, Any] = {
    "kind": "step", "step": 3, "version": "1.3", "reward_mean": 0.4125, "reward_std": 0.49, "rollouts": 128,
    "scored": 127, "failed": 1, "groups": 16, "groups_without_spread": 2, "sampled_tokens": 4000, "sample_s": 8.0,
    "hold_s": 2.0, "agent_cpu_s": 0.812, "agent_rss_mb": 61.7, "update_s": 1.934, "skipped": None,
}  # fmt: skip
VALIDATION = {
    "kind": "validation", "step": 0, "version": "1.0", "pass_at_1": 0.25, "ci_low": 0.182, "ci_high": 0.331,
    "reward_mean": 0.25, "tasks": 128, "rollouts": 128, "seconds": 22.4,
}  # fmt: skip


def part(name: Any, state: str = "running", waiting_for: str | None = None, **detail: Any) -> PartStatus:
    return PartStatus(part=name, pid=1, state=state, waiting_for=waiting_for, detail=detail)


def test_a_step_tells_reward_groups_speed_and_what_agents_and_update_cost() -> None:
    assert row_line(STEP, 30) == (
        "step 3/30  reward 0.41 ± 0.49  16 groups (2 without spread)  128 rollouts (1 failed)  400 tokens/s  "
        "0.81 CPU s and 62 MB an agent  update 1.93 s"
    )


def test_the_speed_is_that_of_the_whole_step() -> None:
    waited_for_nothing = STEP | {
        "sample_s": 0.01,
        "hold_s": 1.99,
        "staleness_max": 1,
        "staleness_mean": 1.0,
        "groups_dropped": 0,
    }
    assert "  2000 tokens/s  " in str(row_line(waited_for_nothing))
    assert "  - tokens/s  " in str(row_line(STEP | {"sample_s": None, "hold_s": None}))


def test_a_step_tells_how_old_its_groups_were_and_which_came_too_late() -> None:
    row = STEP | {"staleness_mean": 1.25, "staleness_max": 3, "groups_dropped": 2}
    assert str(row_line(row)).endswith("update 1.93 s  staleness 1.2, at most 3, 2 groups dropped as too stale")


@pytest.mark.parametrize("row", [STEP, STEP | {"skipped": "no spread"}, VALIDATION])
def test_agents_that_failed_are_told(row: dict[str, Any]) -> None:
    failed = row | {"agents_failed": 90, "agent_error": "ended with exit code 1: KeyError: 'x'"}
    told = "  90 of 128 agents failed, most often: ended with exit code 1: KeyError: 'x'"
    assert row_line(failed) == f"{row_line(row)}{told}"


def test_what_was_not_measured_is_a_dash() -> None:
    line = row_line(STEP | {"reward_mean": None, "reward_std": None, "agent_cpu_s": None, "agent_rss_mb": None})
    assert "reward - ± -" in str(line)
    assert "- CPU s and - MB an agent" in str(line)


def test_a_skipped_step_says_why() -> None:
    assert row_line(STEP | {"skipped": "no group has rewards that differ"}) == (
        "step 3  reward 0.41  skipped: no group has rewards that differ"
    )


def test_a_validation_tells_its_interval() -> None:
    assert row_line(VALIDATION) == (
        "validation at step 0: pass@1 0.250 (0.182 to 0.331), reward 0.25, 128 rollouts in 22 s"
    )


def test_other_rows_are_not_shown() -> None:
    assert row_line({"kind": "something"}) is None


def test_the_present_state_says_what_is_waited_for() -> None:
    trainer = part(
        "trainer", "sampling", "3 of 8 groups", step=2, steps=30, phase="sampling", reward=0.4, tokens_per_s=412.3
    )
    assert state_line([trainer, part("controller", running=7, limit=16)]) == (
        "step 2/30 · sampling · waiting for 3 of 8 groups · reward 0.40 · 412 tokens/s · 7 of 16 agents at work"
    )
    assert state_line([]) == "waiting for the trainer to start"


def test_the_curve_runs_from_the_lowest_to_the_highest() -> None:
    assert curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert curve([0.3, 0.3]) == "▁▁"
    assert len(curve([0.1] * 100)) == 60


def test_a_pipe_gets_rows_and_changes_of_phase_once(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = part("trainer", "validating", phase="validating", step=0, steps=2)
    with PlainDisplay(2) as display:
        display.state([])
        display.state([trainer])
        display.state([trainer])
        display.row(STEP)
        display.row({"kind": "something"})
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == ["step 0/2 · validating", row_line(STEP, 2)]


def test_a_terminal_gets_rows_and_the_state_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveDisplay(2) as display:
        display.row(STEP)
        display.row(STEP | {"step": 4, "reward_mean": 0.9})
        display.state([part("trainer", phase="sampling")])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "step 4/2  reward 0.90" in shown.err


def test_the_display_follows_from_where_stderr_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_display(), PlainDisplay)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert isinstance(make_display(), LiveDisplay)
