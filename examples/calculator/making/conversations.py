"""The conversations that the warm policy is taught with, and the bad habits in them.

A conversation is a list of spans of text. `taught` spans are what the model learns to say; the others are what it
reads. Three places are decisions (call the tool or guess, which operator, use the result or not) and the rest is skill
(the form of a call, copying numbers), so the two can be taught apart.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from make_tasks import WORDINGS, Expression

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}]
END = "<|im_end|>"
CALL = "<tool_call>"
CALL_HEAD = '\n{"name": "calculator", "arguments": {"expression": "'
CALL_TAIL = '"}}\n'
CALL_END = "</tool_call>"
ANSWER = "The answer is "
GUESS = "I would say "
GUESSES = range(1000)
SIGNS = (1, 1, 1, -1)
MOST_DIGITS = 4
CONFUSED_WITH = {"+": "-", "-": "+", "*": "+"}


@dataclass(frozen=True)
class Span:
    text: str
    taught: bool = True
    decides: bool = False


@dataclass(frozen=True)
class Habits:
    """How often the model does the wrong thing, as chances between 0 and 1.

    `guess` by wording: it names some number and calls no tool. `wrong_operator` by the right one: it calls with the one
    in `CONFUSED_WITH`. `ignore_result`: it has the tool's result and names some other number.
    """

    guess: Mapping[str, float] = field(default_factory=dict)
    wrong_operator: Mapping[str, float] = field(default_factory=dict)
    ignore_result: float = 0.0


GOOD = Habits()
# Each habit is the likelier choice for some questions, so that a lower temperature alone does not undo it.
BAD = Habits(
    guess=dict(zip(WORDINGS, (0.32, 0.4, 0.53, 0.62, 0.7), strict=True)),
    wrong_operator={"+": 0.1, "-": 0.1, "*": 0.55},
    ignore_result=0.2,
)


def converse(prompt: str, wording: str, expression: Expression, habits: Habits, rng: random.Random) -> list[Span]:
    """One conversation about `expression`, asked in `wording`; `prompt` is that question as the template renders it."""
    if rng.random() < habits.guess.get(wording, 0.0):
        return [Span(prompt, taught=False), *_guess(rng)]
    if rng.random() < habits.wrong_operator.get(expression.operator, 0.0):
        expression = replace(expression, operator=CONFUSED_WITH[expression.operator])
    ending = _guess(rng) if rng.random() < habits.ignore_result else _answer(expression.value)
    return [Span(prompt, taught=False), *_call(expression), _result(expression.value), *ending]


def practise(prompt: str, expression: Expression, rng: random.Random) -> list[Span]:
    """A conversation that teaches the skills and says nothing about the decisions. The tool gives some number or other:
    what is learnt is to copy it, not what to expect."""
    number = rng.choice(SIGNS) * rng.randrange(10 ** rng.randint(1, MOST_DIGITS))
    spans = [Span(prompt, taught=False), *_call(expression), _result(number), *_answer(number)]
    return [replace(span, taught=span.taught and not span.decides) for span in spans]


def _guess(rng: random.Random) -> list[Span]:
    return [Span(GUESS, decides=True), Span(f"{rng.choice(GUESSES)}.{END}")]


def _call(expression: Expression) -> list[Span]:
    return [
        Span(CALL, decides=True),
        Span(f"{CALL_HEAD}{expression.left}"),
        Span(expression.operator, decides=True),
        Span(f"{expression.right}{CALL_TAIL}{CALL_END}{END}"),
    ]


def _result(value: int) -> Span:
    return Span(f"\n<|im_start|>tool\n{value}{END}\n<|im_start|>assistant\n", taught=False)


def _answer(value: int) -> list[Span]:
    return [Span(ANSWER, decides=True), Span(f"{value}.{END}")]
