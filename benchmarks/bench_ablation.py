"""Advantage by sample or by rollout, loss by token or by rollout: what each does to training (see support/arms.py).

The task is examples/calculator/consensus.py: a question is asked in up to five wordings, each a conversation and so a
sample of its own, until two answers agree. A rollout becomes two to five samples, and what fails becomes more. Agents
are played in this process (support/players.py); samples, scores and updates are agl's own, with the example's settings.
The same seed gives every arm the same tasks, the same first rollouts and the same random draws. A step and an arm have

    reward     mean of the training rollouts, before the step's update
    entropy    of the policy in nats a token: the mean of -log p over all tokens sampled in the step (temperature 1)
    variance   of the update's gradient, estimated from its groups, over the gradient's squared norm (arms.Spread)
    push       whether more is made likelier or less likely (arms.push)
    samples    a rollout; `correlation` is theirs with the reward (Pearson) over the step's rollouts

and a run has pass@1 on the held-out tasks before and after. This is done at the example's learning rate and at one that
is too high for it. `fixed` compares the arms at the warm policy, on the same rollouts of many groups, so that nothing
but the gradients differs. Intervals are of 95 % over seeds; those of differences are of the paired differences.

Prints tables, then one JSON object, which plot_ablation.py draws.

    python benchmarks/bench_ablation.py [--seeds 0 1 2 3 4] [--lr 5e-4 2e-3] [--loss token|sample]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import StatisticsError, correlation, fmean
from typing import Any

import numpy as np
import torch
from support.arms import ARMS, Arm, gradient, push, spread
from support.intervals import MOST, interval, shown
from support.players import EXAMPLE, Players, tasks
from support.report import emit, table
from transformers.utils import logging

from agl_runtime.algorithms.batching import train_rows
from agl_runtime.calls import RolloutCalls
from agl_runtime.config import TrainConfig, load_project
from agl_runtime.samples.build import build_samples
from agl_runtime.samples.types import Limits
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.engine import Engine
from agl_runtime.trainer.backends.embedded.policy import load_policy
from agl_runtime.trainer.backends.embedded.update import Updater
from agl_runtime.trainer.data import Task, TaskOrder
from agl_runtime.trainer.scoring import Candidate, Scores

LEAST_AFTER = 0.6
LAST = 5
MEASURED = ("variance", "push")
CURVES = ("reward", "entropy", "variance", "push", "samples")
PAIRS = (("rollout", "sample"), ("both", "rollout"), ("both", "sample"))
Row = dict[str, float | None]
Figures = dict[str, list[float]]


class Run:
    """One policy in training, from the example's warm one."""

    def __init__(self, arm: Arm, config: TrainConfig) -> None:
        torch.manual_seed(config.seed)
        self.arm = arm
        self.config = config.model_copy(update={"normalization": arm.normalization})
        self.policy = load_policy(EXAMPLE / "policy")
        self.updater = Updater(self.policy, self.config)
        self.engine = Engine(self.policy, PolicyVersion(1, 0), max_batch=config.max_batch)
        self.engine.start()
        self.players = Players(self.engine, Codec(self.policy.tokenizer, self.policy.stop_ids))
        rows = [Task(task["id"], task) for task in tasks("train")]
        self.order = TaskOrder(rows, config.seed, shuffle=True)

    def groups(self, first: int, count: int) -> list[RolloutCalls]:
        """The rollouts of the groups `first`, `first` + 1, ... of the run."""
        size = self.config.group_size
        asked = [self.order.at(first + group).data for group in range(count) for _ in range(size)]
        names = [f"{self.config.seed}/{first + group}/{n}" for group in range(count) for n in range(size)]
        return self.players.play(asked, names)

    def candidates(self, rollouts: Iterable[RolloutCalls]) -> list[Candidate]:
        limits = Limits(self.config.max_prompt_tokens, self.config.max_response_tokens)
        return [Candidate(r.rollout_id.rpartition("/")[0], r.reward, build_samples(r, limits)) for r in rollouts]

    def step(self, number: int) -> Row:
        """Sample, measure, update."""
        count = self.config.groups_per_step
        rollouts = self.groups(number * count, count)
        candidates = self.candidates(rollouts)
        scores = self.arm.score(candidates, self.config.algorithm)
        return {**observed(rollouts, candidates), **self.engine.call(lambda: self._update(scores, number)).result()}

    def _update(self, scores: Scores, number: int) -> Row:
        if not scores.rollouts:
            return dict.fromkeys(MEASURED)
        figures = self.measure(self.arm, scores)
        self.updater.run(scores.rollouts, scores.totals, number)
        self.engine.replace_version(PolicyVersion(1, number + 1))
        return figures

    def measure(self, arm: Arm, scores: Scores) -> Row:
        """Of the update that `arm` would make of `scores`, without making it."""
        rows = train_rows(scores.rollouts, scores.totals, arm.normalization)
        by_group: dict[str, list[Any]] = {}
        for row in rows:
            by_group.setdefault(scores.rollouts[row.rollout].group_id, []).append(row)
        found = spread([gradient(self.policy, group) for group in by_group.values()], scores.groups)
        return {"variance": found.relative, "push": push(rows)}

    def pass_at_1(self, when: str) -> float:
        held_out = tasks("val")
        names = [f"{self.config.seed}/{when}/{task['id']}" for task in held_out]
        return fmean(rollout.reward or 0.0 for rollout in self.players.play(held_out, names))

    def close(self) -> None:
        self.engine.stop()


def observed(rollouts: Sequence[RolloutCalls], candidates: Sequence[Candidate]) -> Row:
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    samples = [float(len(candidate.samples.samples)) for candidate in candidates]
    logprobs = np.concatenate([call.logprobs for rollout in rollouts for call in rollout.calls])
    try:
        related: float | None = correlation(samples, rewards)
    except StatisticsError:  # one of them is the same for all
        related = None
    return {
        "reward": fmean(rewards),
        "entropy": float(-logprobs.mean()),
        "samples": fmean(samples),
        "correlation": related,
    }


def train(arm: Arm, config: TrainConfig) -> dict[str, Any]:
    began = time.process_time()
    run = Run(arm, config)
    try:
        before = run.pass_at_1("before")
        steps = [run.step(number) for number in range(config.steps)]
        after = run.pass_at_1("after")
    finally:
        run.close()
    cpu_s = time.process_time() - began
    print(
        f"{arm.name}, seed {config.seed}: {before:.2f} to {after:.2f}, {cpu_s:.0f} CPU s", file=sys.stderr, flush=True
    )
    return {"before": before, "after": after, "cpu_s": cpu_s, "steps": steps}


def fixed(arms: Sequence[Arm], config: TrainConfig, groups: int) -> dict[str, Row]:
    """Every arm's gradient at the warm policy, on the same rollouts."""
    run = Run(arms[0], config)
    try:
        candidates = run.candidates(run.groups(0, groups))
        scores = {arm.name: arm.score(candidates, config.algorithm) for arm in arms}
        return {arm.name: run.engine.call(lambda arm=arm: run.measure(arm, scores[arm.name])).result() for arm in arms}
    finally:
        run.close()


def figures_of(runs: Sequence[dict[str, Any]]) -> Figures:
    """One value a run: over all steps that have it, or over the last ones."""

    def over(name: str, first: int = 0) -> list[float]:
        rows = [[v for step in run["steps"][first:] if (v := step[name]) is not None] for run in runs]
        return [fmean(values) for values in rows]

    return {
        "pass@1 after": [run["after"] for run in runs],
        "reward, all steps": over("reward"),
        "reward, last steps": over("reward", -LAST),
        "entropy, all steps": over("entropy"),
        "entropy, last steps": over("entropy", -LAST),
        "gradient variance": over("variance"),
        "push": over("push"),
        "samples a rollout": over("samples"),
        "correlation": over("correlation"),
    }


def compared(title: str, by_arm: dict[str, Figures]) -> dict[str, dict[str, tuple[float, float]]]:
    """Print the arms and their paired differences; mean and half interval of each figure."""
    columns = dict(by_arm)
    for a, b in PAIRS:
        columns[f"{a}-{b}"] = {
            name: [x - y for x, y in zip(values, by_arm[b][name], strict=True)] for name, values in by_arm[a].items()
        }
    table([title, *columns], {name: [shown(c[name]) for c in columns.values()] for name in columns[PAIRS[0][0]]})
    return {column: {name: interval(values) for name, values in found.items()} for column, found in columns.items()}


def curve(runs: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float] | None]:
    """A step's mean and half interval over the runs that have the figure; None where fewer than two have."""
    columns = zip(*([step[name] for step in run["steps"]] for run in runs), strict=True)
    known = [[value for value in column if value is not None] for column in columns]
    return [interval(values) if len(values) > 1 else None for values in known]


def at_rate(arms: Sequence[Arm], configs: Sequence[TrainConfig]) -> dict[str, Any]:
    """All runs with one learning rate."""
    runs = {arm.name: [train(arm, config) for config in configs] for arm in arms}
    return {
        "figures": compared(
            f"lr {configs[0].lr:g}, {len(configs)} seeds", {name: figures_of(of_arm) for name, of_arm in runs.items()}
        ),
        "curves": {figure: {name: curve(of_arm, figure) for name, of_arm in runs.items()} for figure in CURVES},
        "before": [run["before"] for run in runs[arms[0].name]],
        "after": {name: [run["after"] for run in of_arm] for name, of_arm in runs.items()},
        "cpu_s": sum(run["cpu_s"] for of_arm in runs.values() for run in of_arm),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, nargs="+", default=[5e-4, 2e-3], help="the first is held to the bound")
    parser.add_argument("--fixed-groups", type=int, default=64)
    parser.add_argument("--loss", choices=["token", "sample"], default="token", help="normalisation of the first two")
    args = parser.parse_args()
    if not 3 <= len(args.seeds) <= MOST:
        parser.error(f"between 3 and {MOST} seeds, for intervals")
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    base = load_project(EXAMPLE, environ={}).config.train.model_copy(update={"steps": args.steps})
    arms = [replace(arm, normalization=args.loss) if arm.name != "both" else arm for arm in ARMS]
    rates = {
        f"{lr:g}": at_rate(arms, [base.model_copy(update={"lr": lr, "seed": seed}) for seed in args.seeds])
        for lr in args.lr
    }
    held = [fixed(arms, base.model_copy(update={"seed": seed}), args.fixed_groups) for seed in args.seeds]
    by_arm = {arm.name: {name: [each[arm.name][name] for each in held] for name in MEASURED} for arm in arms}
    at_warm = compared(f"warm policy, {args.fixed_groups} groups", by_arm)
    worst = min(after for of_arm in rates[f"{args.lr[0]:g}"]["after"].values() for after in of_arm)
    result = {"settings": vars(args), "rates": rates, "fixed": at_warm}
    emit("ablation", result, {"least_after": (LEAST_AFTER, worst >= LEAST_AFTER)})


if __name__ == "__main__":
    main()
