"""What a run measures: the lines of metrics.jsonl, and summary.json, which is a function of those lines.

A figure is finite, or null where there was nothing to measure. Every line has `kind`, `run_id` and `elapsed_s`, the
seconds of the run so far over all its processes. A resumed run first takes back the lines past its checkpoint, so that
no step stands there twice.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.evaluation import Evaluation
from agl_runtime.trainer.rollouts import Result
from agl_runtime.trainer.scoring import Scores
from agl_runtime.trainer.state import replace_file

Line = dict[str, Any]
LOSS_FIELDS = ("loss", "grad_norm", "kl", "clip_fraction", "entropy", "logprob_gap", "tis_weight", "tis_capped")
EVALUATION_FIELDS = ("pass_at_1", "ci_low", "ci_high", "reward_mean", "tasks", "rollouts")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: sampling the batch; calls held; within that, the update; the checkpoint."""

    sample_s: float = 0.0
    hold_s: float = 0.0
    update_s: float = 0.0
    save_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Age:
    """`staleness` of each group of the batch: updates since it was enqueued. `dropped` counts the groups that became
    too stale since the last step."""

    staleness: tuple[int, ...] = (0,)
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended and after which step. `ended` is complete, stopped, no_signal or failed; `reason` is a sentence
    where the end needs one."""

    ended: str
    step: int
    version: PolicyVersion
    reason: str | None = None


class MetricsLog:
    """Appends to one file. `elapsed_s` goes on from the last line kept."""

    def __init__(self, file: Path, run_id: str) -> None:
        self._file = file
        self._run_id = run_id
        self._origin = time.monotonic()
        self.lines: list[Line] = []

    def rewind(self, step: int, line: Mapping[str, Any] | None = None) -> None:
        """Keep the lines of this run up to `step`; those of an earlier run go. `line` is that of `step` itself, which
        is put back where it is missing."""
        self.lines = [kept for kept in _read(self._file) if _belongs(kept, self._run_id, step)]
        replace_file(self._file, "".join(json.dumps(kept) + "\n" for kept in self.lines))
        self._origin = time.monotonic() - max((kept["elapsed_s"] for kept in self.lines), default=0.0)
        if line and not any((kept["kind"], kept["step"]) == ("step", step) for kept in self.lines):
            self.append(line)

    def append(self, line: Mapping[str, Any]) -> None:
        whole = {**line, "run_id": self._run_id, "elapsed_s": round(self.elapsed_s(), 3)}
        self.lines.append(whole)
        with self._file.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(whole) + "\n")

    def elapsed_s(self) -> float:
        return time.monotonic() - self._origin

    def validated(self) -> int:
        """Step of the last validation kept; -1 when there is none."""
        return max((line["step"] for line in self.lines if line["kind"] == "validation"), default=-1)


def step_line(
    step: int,
    version: PolicyVersion,
    ended: Sequence[Result],
    scores: Scores,
    figures: Mapping[str, float],
    times: Times,
    age: Age,
) -> Line:
    """Of one batch. `figures` are the backend's; those it does not give, or a skipped step's, are 0, but for
    `logprob_gap`, which is null where no fresh token could be compared."""
    rewards = [item.reward for item in ended if item.reward is not None]
    report = scores.report
    return {
        "kind": "step",
        "step": step,
        "version": str(version),
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_std": pstdev(rewards) if rewards else None,
        "rollouts": len(ended),
        "scored": len(rewards),
        "failed": len(ended) - len(rewards),
        **agent_failures(ended),
        "groups": scores.groups,
        "groups_without_spread": scores.groups_without_spread,
        "samples": scores.totals.samples,
        "sampled_tokens": report.sampled_tokens,
        "trained_tokens": report.trained_tokens,
        "trained_share": report.trained_share,
        **{name: figures.get(name, 0.0) for name in LOSS_FIELDS},
        "logprob_gap": figures.get("logprob_gap"),
        **{name: round(seconds, 4) for name, seconds in asdict(times).items()},
        "hold_share": times.hold_s / (times.sample_s + times.hold_s) if times.hold_s else 0.0,
        "staleness_mean": fmean(age.staleness),
        "staleness_max": max(age.staleness),
        "groups_dropped": age.dropped,
        **agent_use(ended),
        "splits": report.splits,
        "untrained": report.untrained,
        "dropped": report.dropped,
        "skipped": scores.skipped,
    }


def tokens_per_s(line: Mapping[str, Any]) -> float | None:
    """Sampled tokens of the batch over the whole step: an asynchronous one may wait for no rollout, as its agents
    worked in the steps before."""
    seconds = (line.get("sample_s") or 0.0) + (line.get("hold_s") or 0.0)
    return round(line["sampled_tokens"] / seconds, 1) if seconds else None


def untold(line: Line) -> Line:
    """The same line before its backend told anything."""
    return {**line, **dict.fromkeys((*LOSS_FIELDS, *Times.__dataclass_fields__, "hold_share"))}


def validation_line(
    step: int, version: PolicyVersion, result: Evaluation, ended: Sequence[Result], seconds: float
) -> Line:
    return {
        "kind": "validation",
        "step": step,
        "version": str(version),
        **asdict(result),
        "failed": sum(item.reward is None for item in ended),
        **agent_failures(ended),
        "seconds": round(seconds, 3),
        **agent_use(ended),
    }


def agent_failures(ended: Sequence[Result]) -> Line:
    """How many agents of scored rollouts failed, and how most of them did."""
    errors = Counter(item.agent_error for item in ended if item.reward is not None and item.agent_error)
    return {"agents_failed": errors.total(), "agent_error": errors.most_common(1)[0][0] if errors else None}


def agent_use(ended: Sequence[Result]) -> Line:
    """Mean CPU seconds and mean peak memory of the agents that were measured, and their CPU seconds in all."""
    cpu = [item.cpu_s for item in ended if item.cpu_s is not None]
    rss = [item.rss_mb for item in ended if item.rss_mb is not None]
    return {
        "agent_cpu_s": fmean(cpu) if cpu else None,
        "agent_rss_mb": fmean(rss) if rss else None,
        "agent_cpu_s_total": sum(cpu),
    }


def summary(
    lines: Sequence[Line],
    *,
    run_id: str,
    mode: str,
    seed: int,
    elapsed_s: float,
    checkpoint: Path | None,
    outcome: Outcome,
) -> Line:
    """summary.json. `after` is the validation that followed the last step, null when that has not come yet."""
    validations = [line for line in lines if line["kind"] == "validation"]
    updates = [line for line in lines if line["kind"] == "step"]
    return {
        "run_id": run_id,
        "mode": mode,
        "seed": seed,
        "before": _validation_at(validations, 0),
        "after": _validation_at(validations, outcome.step) if outcome.step > 0 else None,
        "steps": outcome.step,
        "seconds": round(elapsed_s, 3),
        "train_seconds": round(elapsed_s - sum(line["seconds"] for line in validations), 3),
        "checkpoint": str(checkpoint) if checkpoint else None,
        "version": str(outcome.version),
        "ended": outcome.ended,
        "reason": outcome.reason,
        "agent_cpu_s_total": round(sum(line["agent_cpu_s_total"] for line in lines), 3),
        "update_s_total": round(sum(line["update_s"] or 0.0 for line in updates), 3),
        "logprob_gap_max": max((line["logprob_gap"] or 0.0 for line in updates), default=0.0),
    }


def write_summary(file: Path, content: Mapping[str, Any]) -> None:
    replace_file(file, json.dumps({**content, "finished_at": time.time()}, indent=2) + "\n")


def _validation_at(validations: Sequence[Line], step: int) -> Line | None:
    found = [line for line in validations if line["step"] == step]
    return {name: found[-1][name] for name in EVALUATION_FIELDS} if found else None


def _belongs(line: Line, run_id: str, step: int) -> bool:
    return line.get("run_id") == run_id and line["step"] <= step


def _read(file: Path) -> list[Line]:
    """Whole lines only: a crash may have cut the last one."""
    try:
        texts = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    lines = []
    for text in texts:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict) and {"kind", "step", "elapsed_s"} <= line.keys()]
