"""Answers a question of arithmetic by asking it in other words until two answers agree.

Each wording is a conversation of its own, so that none is led by an earlier one.

python consensus.py "What is 47 times 83?"
"""

import re
import sys

from agent import answer

WORDINGS = ("What is {}?", "How much is {}?", "Calculate {}.", "Please compute {}.", "I need {}.")


def wordings(question: str) -> list[str]:
    """The question as it was asked, then in the other wordings."""
    subject = re.sub(r"^(What is|How much is|Calculate|Please compute|I need) |[?.]$", "", question)
    return [question, *(asked for wording in WORDINGS if (asked := wording.format(subject)) != question)]


def agreed(answers: list[str]) -> str | None:
    """The last number of the newest answer, where an earlier answer ends with it too."""
    found = [re.findall(r"-?\d+(?:\.\d+)?", said)[-1:] for said in answers]
    return found[-1][0] if found[-1] and found[-1] in found[:-1] else None


def consensus(question: str) -> str:
    answers = []
    for asked in wordings(question):
        answers.append(answer(asked))
        if number := agreed(answers):
            return f"The answer is {number}."
    return "No two answers agree."


if __name__ == "__main__":
    print(consensus(sys.argv[1]))
