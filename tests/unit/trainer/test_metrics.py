from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.evaluation import evaluate
from agl_runtime.trainer.metrics import (
    Age,
    MetricsLog,
    Outcome,
    Times,
    agent_failures,
    step_line,
    summary,
    untold,
    validation_line,
    write_summary,
)
from agl_runtime.trainer.rollouts import agent_error
from agl_runtime.trainer.scoring import Candidate, score
from fakes.trained import make_ended, make_samples

FILE = Path("metrics.jsonl")
VERSION = PolicyVersion(1, 1)


def step(number: int = 1, rewards: tuple[float | None, ...] = (1.0, 0.0), **figures: float) -> dict:
    ended = [make_ended(f"r{n}", reward, cpu_s=0.5) for n, reward in enumerate(rewards)]
    scores = score([Candidate("g", item.reward, make_samples(), item.error) for item in ended], "grpo")
    return step_line(number, VERSION, ended, scores, figures, Times(2.0, 1.0, 0.5), Age((0, 2, 1), 3))


def validation(number: int, *rewards: float, seconds: float = 3.0) -> dict:
    result = evaluate({str(n): [reward] for n, reward in enumerate(rewards)})
    assert result is not None
    return validation_line(
        number, VERSION, result, [make_ended(reward=reward, cpu_s=1.0) for reward in rewards], seconds
    )


def test_a_step_says_what_was_sampled_scored_and_learnt() -> None:
    line = step(3, (1.0, 0.0, None), loss=0.25, logprob_gap=1e-5, tis_weight=1.1)
    assert (line["kind"], line["step"], line["version"]) == ("step", 3, "1.1")
    assert (line["rollouts"], line["scored"], line["failed"]) == (3, 2, 1)
    assert (line["reward_mean"], line["reward_std"]) == (0.5, 0.5)
    assert (line["samples"], line["sampled_tokens"], line["trained_tokens"], line["trained_share"]) == (2, 9, 9, 1.0)
    assert (line["loss"], line["logprob_gap"], line["kl"]) == (0.25, 1e-5, 0.0)
    assert (line["sample_s"], line["hold_s"], line["update_s"], line["save_s"]) == (2.0, 1.0, 0.5, 0.0)
    assert line["hold_share"] == pytest.approx(1 / 3)
    assert (line["staleness_mean"], line["staleness_max"], line["groups_dropped"]) == (1.0, 2, 3)
    assert (line["tis_weight"], line["tis_capped"]) == (1.1, 0.0)
    assert (line["agent_cpu_s"], line["agent_rss_mb"], line["agent_cpu_s_total"]) == (0.5, 50.0, 1.5)
    assert line["skipped"] is None


def test_agents_that_failed_are_counted_with_what_most_of_them_said() -> None:
    errors = ["ended with exit code 1: KeyError", None, "ran into its time limit", "ended with exit code 1: KeyError"]
    ended = [make_ended(agent_error=error) for error in errors] + [make_ended(reward=None, agent_error="lost")]
    assert agent_failures(ended) == {"agents_failed": 3, "agent_error": "ended with exit code 1: KeyError"}


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ({}, None),
        ({"exit_code": 0, "stderr_tail": "a warning"}, None),
        ({"exit_code": 2, "stderr_tail": "Traceback\n  x\nKeyError: 'a'\n"}, "ended with exit code 2: KeyError: 'a'"),
        ({"exit_code": None, "signal": 9, "stderr_tail": ""}, "was ended by signal 9"),
        ({"timed_out": True, "signal": 9, "stderr_tail": "x"}, "ran into its time limit"),
    ],
)
def test_how_an_agent_failed_is_read_from_its_exit(ending: dict, error: str | None) -> None:
    assert agent_error(ending) == error


def test_a_step_whose_rollouts_all_failed_has_finite_figures_or_none_and_its_reason() -> None:
    line = step(1, (None, None))
    assert line["reward_mean"] is None
    assert line["skipped"].startswith("all 2 rollouts ended without a reward")
    assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))


def test_lines_are_appended_with_the_run_and_its_seconds() -> None:
    log = MetricsLog(FILE, "r1")
    log.append(step(1))
    log.append(step(2))
    lines = [json.loads(text) for text in FILE.read_text().splitlines()]
    assert [(line["step"], line["run_id"]) for line in lines] == [(1, "r1"), (2, "r1")]
    assert lines == log.lines
    assert 0 <= lines[0]["elapsed_s"] <= lines[1]["elapsed_s"]


def test_a_resumed_run_takes_back_the_lines_past_its_checkpoint_and_of_other_runs() -> None:
    MetricsLog(FILE, "r0").append(step(1))
    first = MetricsLog(FILE, "r1")
    for line in (validation(0, 1.0), step(1), step(2), validation(2, 1.0), step(3)):
        first.append(line)
    with FILE.open("a") as handle:
        handle.write('{"kind": "step", "cut')
    again = MetricsLog(FILE, "r1")
    again.rewind(2)
    kept = [(json.loads(text)["kind"], json.loads(text)["step"]) for text in FILE.read_text().splitlines()]
    assert kept == [("validation", 0), ("step", 1), ("step", 2), ("validation", 2)]
    assert again.validated() == 2


def test_the_line_of_a_checkpoint_that_a_crash_kept_from_the_file_is_put_back() -> None:
    first = MetricsLog(FILE, "r1")
    first.append(step(1))
    again = MetricsLog(FILE, "r1")
    again.rewind(2, step(2))
    again.rewind(2, step(2))
    assert [json.loads(text)["step"] for text in FILE.read_text().splitlines()] == [1, 2]


def test_the_seconds_of_a_run_go_on_where_its_last_line_left_them() -> None:
    FILE.write_text(json.dumps({"kind": "step", "step": 1, "run_id": "r1", "elapsed_s": 1000.0}) + "\n")
    log = MetricsLog(FILE, "r1")
    log.rewind(1)
    assert log.elapsed_s() >= 1000.0


def test_nothing_is_validated_before_the_first_line_says_so() -> None:
    assert MetricsLog(FILE, "r1").validated() == -1


def of(*lines: dict, step: int = 2, ended: str = "complete") -> dict:
    return summary(
        lines,
        run_id="r1",
        mode="train",
        seed=7,
        elapsed_s=100.0,
        checkpoint=Path("checkpoints/1.2"),
        outcome=Outcome(ended, step, PolicyVersion(1, 2)),
    )


def test_the_summary_tells_before_from_after_and_adds_up_what_the_lines_say() -> None:
    lines = [validation(0, 0.0, 1.0), step(1, logprob_gap=1e-6), step(2, logprob_gap=3e-6), validation(2, 1.0, 1.0)]
    content = of(*lines)
    assert content["before"]["pass_at_1"] == 0.5
    assert content["after"]["pass_at_1"] == 1.0
    assert sorted(content["after"]) == ["ci_high", "ci_low", "pass_at_1", "reward_mean", "rollouts", "tasks"]
    assert (content["seconds"], content["train_seconds"]) == (100.0, 94.0)
    assert (content["update_s_total"], content["logprob_gap_max"]) == (1.0, 3e-6)
    assert content["agent_cpu_s_total"] == pytest.approx(6.0)
    assert (content["run_id"], content["mode"], content["seed"], content["version"]) == ("r1", "train", 7, "1.2")
    assert (content["steps"], content["ended"], content["reason"]) == (2, "complete", None)
    assert content["checkpoint"] == "checkpoints/1.2"


def test_a_step_whose_backend_had_not_told_its_figures_counts_for_the_rest() -> None:
    line = untold(step(1, (1.0, 0.0)))
    assert (line["reward_mean"], line["loss"], line["logprob_gap"], line["update_s"]) == (0.5, None, None, None)
    content = of(line, step(2, logprob_gap=3e-6))
    assert (content["update_s_total"], content["logprob_gap_max"]) == (0.5, 3e-6)


def test_a_run_that_was_stopped_before_its_last_validation_has_no_after() -> None:
    content = of(validation(0, 0.0), step(1), step=1, ended="stopped")
    assert content["before"] is not None
    assert content["after"] is None


def test_a_summary_is_written_whole_with_the_time_of_its_writing() -> None:
    write_summary(FILE, {"steps": 1})
    written = json.loads(FILE.read_text())
    assert written["steps"] == 1
    assert written["finished_at"] > 0
