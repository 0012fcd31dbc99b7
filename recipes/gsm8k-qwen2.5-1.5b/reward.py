"""1.0 where the number after the last `Answer:` is the right one."""

import re


def reward(task: dict, output: dict) -> float:
    found = re.findall(r"Answer:\s*\**\s*\$?(-?[\d,]*\.?\d+)", output["stdout"])
    return float(bool(found) and float(found[-1].replace(",", "")) == task["answer"])
