"""1.0 where the integer after the last `Answer:` is the right one."""

import re


def reward(task: dict, output: dict) -> float:
    found = re.findall(r"Answer:\s*\**\s*\$?(-?\d+)", output["stdout"].replace(",", ""))
    return float(bool(found) and int(found[-1]) == task["answer"])
