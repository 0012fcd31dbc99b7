"""Makes tasks/train.jsonl and tasks/val.jsonl: one arithmetic question a line, the same ones on every run.

A task is {"id", "question", "answer"}. `HELD_OUT` is fixed by a seed of its own, so that no expression of a validation
task ever stands in a training task or in a conversation that the warm policy was taught with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TRAIN_TASKS = 1000
VAL_TASKS = 128
SEED = 20_261_130
LOWEST, HIGHEST = 10, 99
WORDS = {"+": "plus", "-": "minus", "*": "times"}
WORDINGS = ("What is {}?", "How much is {}?", "Calculate {}.", "Please compute {}.", "I need {}.")

Task = dict[str, str | int]


@dataclass(frozen=True)
class Expression:
    left: int
    operator: str
    right: int

    @property
    def text(self) -> str:
        return f"{self.left}{self.operator}{self.right}"

    @property
    def spoken(self) -> str:
        return f"{self.left} {WORDS[self.operator]} {self.right}"

    @property
    def value(self) -> int:
        if self.operator == "+":
            return self.left + self.right
        return self.left - self.right if self.operator == "-" else self.left * self.right


def draw(rng: random.Random) -> Expression:
    return Expression(rng.randint(LOWEST, HIGHEST), rng.choice(list(WORDS)), rng.randint(LOWEST, HIGHEST))


def draw_distinct(rng: random.Random, count: int, taken: Iterable[Expression] = ()) -> list[Expression]:
    """`count` different expressions, none of them in `taken`."""
    seen = set(taken)
    found: list[Expression] = []
    while len(found) < count:
        expression = draw(rng)
        if expression not in seen:
            seen.add(expression)
            found.append(expression)
    return found


def held_out() -> list[Expression]:
    """The expressions of the validation tasks."""
    return draw_distinct(random.Random(SEED), VAL_TASKS)


def make_tasks() -> dict[str, list[Task]]:
    rng = random.Random(SEED + 1)
    val = held_out()
    train = draw_distinct(rng, TRAIN_TASKS, taken=val)
    return {"train": _tasks("train", train), "val": _tasks("val", val)}


def _tasks(prefix: str, expressions: Iterable[Expression]) -> list[Task]:
    tasks: list[Task] = []
    for number, expression in enumerate(expressions):
        question = WORDINGS[number % len(WORDINGS)].format(expression.spoken)
        tasks.append({"id": f"{prefix}-{number:04}", "question": question, "answer": expression.value})
    return tasks


def main() -> None:
    folder = Path(__file__).parent.parent / "tasks"
    for name, tasks in make_tasks().items():
        lines = [json.dumps(task) + "\n" for task in tasks]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(lines)} tasks")


if __name__ == "__main__":
    main()
