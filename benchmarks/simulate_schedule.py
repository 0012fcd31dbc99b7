"""What the schedule alone allows: the state machine of `trainer/schedule.py` in simulated time.

Agents take log-normal times (median 1 s, 95th percentile 8 s), with a model call at their start and one half-way. The
oldest rollout that waits takes a free slot. A call that meets an update waits for its end; an agent of a dropped group
ends at its next call. `bench_schedule.py` runs the same agents through the real parts and compares.

    python benchmarks/simulate_schedule.py [--seeds 10] [--steps 64]
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer import schedule
from agl_runtime.trainer.schedule import Drop, Enqueue, GroupFinished, Plan, Save, Saved, State, Update, Updated

BATCH = 8
GROUP_SIZE = 4
SLOTS = 32
UPDATE_S = 1.0
MEDIAN_S = 1.0
SIGMA = math.log(8.0 / MEDIAN_S) / 1.6448536269514722  # puts the 95th percentile at 8 s
ACTIVE = (8, 12, 16, 20, 24, 32)
LIMITS = (2, 4, 8, None)


def duration_s(seed: int, group: int, index: int) -> float:
    return random.Random(f"{seed}:{group}:{index}").lognormvariate(math.log(MEDIAN_S), SIGMA)


@dataclass
class Outcome:
    """Of each update the time of its end, and mean and most staleness of its groups; of the run the groups dropped."""

    ends: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    dropped: int = 0

    def groups_per_minute(self, active: int) -> float:
        """In the long run: without the steps in which the groups first active come in, nor the last ones, which wait
        for all that is left."""
        edge = -(-active // BATCH) if active > BATCH else 0
        ends = [0.0, *self.ends][edge : len(self.ends) + 1 - edge]
        return BATCH * (len(ends) - 1) / (ends[-1] - ends[0]) * 60

    @property
    def dropped_share(self) -> float:
        return self.dropped / (self.dropped + BATCH * len(self.ends))

    def figures(self, active: int) -> dict[str, float]:
        return {
            "groups_per_minute": round(self.groups_per_minute(active), 1),
            "staleness_mean": round(fmean(self.means), 2),
            "staleness_max": max(self.most),
            "dropped_share": round(self.dropped_share, 4),
        }


def plan(steps: int, active: int, max_staleness: int | None) -> Plan:
    return Plan(steps=steps, batch=BATCH, active=active, max_staleness=max_staleness)


@dataclass
class World:
    plan: Plan
    seed: int
    now: float = 0.0
    state: State = field(default_factory=State)
    outcome: Outcome = field(default_factory=Outcome)
    events: list[tuple[float, int, int, int, int]] = field(default_factory=list)  # time, order, group, index, part
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    held: list[tuple[int, int, int]] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)
    free: int = SLOTS
    is_updating: bool = False
    count: int = 0

    def run(self) -> Outcome:
        self._take(schedule.begin(self.plan, self.state))
        while self.state.phase is not schedule.Phase.DONE:
            self._start()
            self.now, _, group, index, part = heapq.heappop(self.events)
            if group < 0:
                self._updated()
            elif part < 2:
                self._call(group, index, part)
            else:
                self._end(group)
        return self.outcome

    def _at(self, time: float, group: int, index: int, part: int) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, group, index, part))

    def _start(self) -> None:
        while self.free and self.waiting:
            group, index = self.waiting.popleft()
            if group in self.left:
                self.free -= 1
                self._call(group, index, 0)

    def _call(self, group: int, index: int, part: int) -> None:
        if group not in self.left:
            self.free += 1  # dropped
        elif self.is_updating:
            self.held.append((group, index, part))
        else:
            self._at(self.now + duration_s(self.seed, group, index) / 2, group, index, part + 1)

    def _end(self, group: int) -> None:
        self.free += 1
        if group in self.left:
            self.left[group] -= 1
            if not self.left[group]:
                self._take(schedule.advance(self.plan, self.state, GroupFinished(group)))

    def _updated(self) -> None:
        self.is_updating = False
        self.outcome.ends.append(self.now)
        held, self.held = self.held, []
        for call in held:
            self._call(*call)
        self._take(schedule.advance(self.plan, self.state, Updated(PolicyVersion(1, self.state.version.updates + 1))))

    def _take(self, move: schedule.Move) -> None:
        self.state, actions = move
        for action in actions:
            match action:
                case Enqueue(group):
                    self.left[group.number] = GROUP_SIZE
                    self.waiting.extend((group.number, index) for index in range(GROUP_SIZE))
                case Drop(group):
                    self.outcome.dropped += 1
                    del self.left[group.number]
                case Update(groups):
                    self.is_updating = True
                    ages = [self.state.staleness(group) for group in groups]
                    self.outcome.means.append(fmean(ages))
                    self.outcome.most.append(max(ages))
                    self._at(self.now + UPDATE_S, -1, 0, 0)
                case Save():
                    self._take(schedule.advance(self.plan, self.state, Saved()))


def simulate(chosen: Plan, seed: int) -> Outcome:
    return World(chosen, seed).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args()
    rows = []
    print(
        f"{'active':>6} {'limit':>6} {'groups/min':>11} {'over sync':>10} {'staleness':>10} {'most':>5} {'dropped':>8}"
    )
    for active in ACTIVE:
        for limit in LIMITS if active > BATCH else (None,):
            runs = [simulate(plan(args.steps, active, limit), seed).figures(active) for seed in range(args.seeds)]
            mean = {name: fmean(run[name] for run in runs) for name in runs[0]}
            most = max(run["staleness_max"] for run in runs)
            rows.append({"active": active, "max_staleness": limit, **mean, "staleness_max": most})
            rate, share = mean["groups_per_minute"], mean["dropped_share"]
            print(
                f"{active:>6} {limit or 'none':>6} {rate:>11.1f} {rate / rows[0]['groups_per_minute']:>10.2f} "
                f"{mean['staleness_mean']:>10.2f} {most:>5} {share:>8.1%}"
            )
    print(json.dumps({"benchmark": "simulate_schedule", "rows": rows}))


if __name__ == "__main__":
    main()
