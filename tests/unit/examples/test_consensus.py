"""The agent that asks in several wordings."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_question_is_asked_as_it_came_and_then_in_the_other_wordings(module: Any) -> None:
    assert module("consensus").wordings("Calculate 7 plus 12.") == [
        "Calculate 7 plus 12.",
        "What is 7 plus 12?",
        "How much is 7 plus 12?",
        "Please compute 7 plus 12.",
        "I need 7 plus 12.",
    ]


def test_the_wordings_are_those_that_the_policy_knows(module: Any, tasks: Any) -> None:
    assert module("consensus").WORDINGS == module("make_tasks").WORDINGS
    assert all(len(module("consensus").wordings(task["question"])) == 5 for task in tasks["train"])


@pytest.mark.parametrize(
    ("answers", "number"),
    [
        (["The answer is 19."], None),
        (["The answer is 19.", "I would say 19."], "19"),
        (["19", "20", "The answer is 20."], "20"),
        (["19", "20", "21"], None),
        (["7 plus 12 is 19", "12 is what I say, and 7"], None),
        (["no idea", "no idea"], None),
        (["-61", "61"], None),
    ],
)
def test_answers_agree_when_the_newest_number_was_said_before(
    module: Any, answers: list[str], number: str | None
) -> None:
    assert module("consensus").agreed(answers) == number
