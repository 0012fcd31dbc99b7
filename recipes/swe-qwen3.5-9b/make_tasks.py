"""Writes train.jsonl and val.jsonl from SWE-smith and builds the tasks' images: `pip install datasets`, Docker, then
`python make_tasks.py --tasks 600`.

SWE-smith has an image for each repository and in it a branch for each task, of two commits: the bug, and the removal of
the tests that show it. `tests` is the first of them; `agent` is the second, without git's history.
"""

import argparse
import json
import random
import subprocess
from pathlib import Path

from datasets import load_dataset

DATASET = "SWE-bench/SWE-smith"
VALIDATION = 64
IMAGES = """
FROM {base} AS tests
RUN cd /testbed && git fetch -q && git checkout -q {task} && git checkout -q HEAD~1
FROM tests AS agent
RUN cd /testbed && git checkout -q {task} && rm -rf .git && git init -q && git add -A \
 && git -c user.name=task -c user.email=task@localhost commit -q -m start
"""


def files(tests: list[str]) -> list[str]:
    return sorted({test.partition("::")[0] for test in tests})


def task_of(row: dict) -> dict:
    shown = files(row["FAIL_TO_PASS"])
    return {
        "id": row["instance_id"],
        "problem_statement": row["problem_statement"],
        "image": f"swesmith-agent:{row['instance_id']}",
        "tests_image": f"swesmith-tests:{row['instance_id']}",
        "files": shown,
        "must_pass": row["FAIL_TO_PASS"] + [test for test in row["PASS_TO_PASS"] if files([test])[0] in shown],
    }


def build(row: dict) -> None:
    dockerfile = IMAGES.format(base=row["image_name"], task=row["instance_id"])
    for target in ("tests", "agent"):
        tag = f"swesmith-{target}:{row['instance_id']}"
        command = ["docker", "build", "--quiet", "--target", target, "--tag", tag, "-"]
        subprocess.run(command, input=dockerfile, text=True, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=600)
    wanted = parser.parse_args().tasks
    rows = [row for row in load_dataset(DATASET, split="train") if row["problem_statement"] and row["FAIL_TO_PASS"]]
    random.Random(0).shuffle(rows)
    tasks = []
    for row in rows:
        if len(tasks) == wanted:
            break
        try:
            build(row)
        except subprocess.CalledProcessError as error:
            print(f"left out: {row['instance_id']} ({error})")
        else:
            tasks.append(task_of(row))
    held_out = min(VALIDATION, len(tasks) // 4)
    for file, part in (("val.jsonl", tasks[:held_out]), ("train.jsonl", tasks[held_out:])):
        Path(file).write_text("".join(json.dumps(task) + "\n" for task in part), encoding="utf-8")


if __name__ == "__main__":
    main()
