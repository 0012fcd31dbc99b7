"""How well the agent did on one task: agl calls `reward` after each rollout."""

import re


def reward(task: dict, output: dict) -> float:
    """1.0 when the last number of the last line that the agent printed is the right answer, else 0.0."""
    lines = output["stdout"].strip().splitlines()
    numbers = re.findall(r"-?\d+(?:\.\d+)?", lines[-1]) if lines else []
    return float(bool(numbers) and float(numbers[-1]) == task["answer"])
