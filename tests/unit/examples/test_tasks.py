"""The task files of the calculator example."""

from __future__ import annotations

import operator
from typing import Any

import pytest

OPERATORS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
Tasks = dict[str, list[dict[str, Any]]]


def expression(question: str) -> tuple[int, str, int]:
    words = question.rstrip("?.").split()
    left, word, right = words[-3:]
    return int(left), word, int(right)


def test_no_expression_is_both_trained_and_held_out(tasks: Tasks) -> None:
    train, val = ({expression(task["question"]) for task in tasks[name]} for name in ("train", "val"))
    assert not train & val
    assert (len(train), len(val)) == (len(tasks["train"]), len(tasks["val"])) == (1000, 128)


def test_the_conversations_that_teach_hold_no_held_out_expression(module: Any, tasks: Tasks) -> None:
    kept_back = {(e.left, module("make_tasks").WORDS[e.operator], e.right) for e in module("make_tasks").held_out()}
    assert kept_back == {expression(task["question"]) for task in tasks["val"]}


@pytest.mark.parametrize("name", ["train", "val"])
def test_every_answer_is_right_and_every_id_unique(tasks: Tasks, name: str) -> None:
    for task in tasks[name]:
        left, word, right = expression(task["question"])
        assert task["answer"] == OPERATORS[word](left, right), task
    assert len({task["id"] for task in tasks[name]}) == len(tasks[name])


def test_the_script_makes_the_files_that_ship(module: Any, tasks: Tasks) -> None:
    assert module("make_tasks").make_tasks() == tasks
