"""The calculator and the reward of the example agent."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("text", "value"),
    [("12+30", 42), ("7-19", -12), ("47*83", 3901), ("-5+2", -3), ("(1+2)*3", 9), ("9/2", 4.5), ("1.5*2", 3.0)],
)
def test_the_calculator_works_out_arithmetic(module: Any, text: str, value: float) -> None:
    assert module("agent").calculate(text) == value


@pytest.mark.parametrize("text", ["__import__('os')", "2**99999", "x+1", "'a'*3", "1 if 1 else 2", "1+", ""])
def test_the_calculator_refuses_anything_else(module: Any, text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        module("agent").calculate(text)


@pytest.mark.parametrize(
    "arguments", ["not json", "[]", "{}", '{"expression": 3}', '{"expression": "1/0"}', '{"expression": "9-."}']
)
def test_a_tool_call_that_makes_no_sense_is_answered_with_an_error(module: Any, arguments: str) -> None:
    assert module("agent").run_tool(arguments).startswith("error: ")


@pytest.mark.parametrize(
    ("stdout", "earned"),
    [
        ("The answer is -61.\n", 1.0),
        ("thinking about 61\nThe answer is -61.\n\n", 1.0),
        ("20 minus 81 is -61\n", 1.0),
        ("-61.0", 1.0),
        ("The answer is 61.\n", 0.0),
        ("The answer is -61.\nNo, 5.\n", 0.0),
        ("no number\n", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_is_for_the_last_number_printed(module: Any, stdout: str, earned: float) -> None:
    assert module("reward").reward({"answer": -61}, {"stdout": stdout, "stderr": ""}) == earned
