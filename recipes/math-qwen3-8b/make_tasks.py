"""Writes train.jsonl (MATH, levels 3 to 5) and val.jsonl (MATH-500) with the problems whose answer is an integer:
`pip install datasets`, then `python make_tasks.py`."""

import json
import re
from pathlib import Path

from datasets import get_dataset_config_names, load_dataset

TRAIN, VAL = "EleutherAI/hendrycks_math", "HuggingFaceH4/MATH-500"
HARD = ("Level 3", "Level 4", "Level 5")


def integer(text: str) -> int | None:
    plain = text.strip().replace(",", "").replace("\\!", "")
    return int(plain) if re.fullmatch(r"-?\d+", plain) else None


def boxed(solution: str) -> int | None:
    found = re.findall(r"\\boxed\{([^{}]*)\}", solution)
    return integer(found[-1]) if found else None


def write(file: str, rows: list[tuple[str, int | None]]) -> None:
    tasks = [
        {"id": f"{Path(file).stem}-{n}", "problem": text, "answer": answer} for n, (text, answer) in enumerate(rows)
    ]
    lines = (json.dumps(task) + "\n" for task in tasks if task["answer"] is not None)
    Path(file).write_text("".join(lines), encoding="utf-8")


def main() -> None:
    subjects = [load_dataset(TRAIN, name, split="train") for name in get_dataset_config_names(TRAIN)]
    hard = [row for subject in subjects for row in subject if row["level"] in HARD]
    write("train.jsonl", [(row["problem"], boxed(row["solution"])) for row in hard])
    write("val.jsonl", [(row["problem"], integer(row["answer"])) for row in load_dataset(VAL, split="test")])


if __name__ == "__main__":
    main()
