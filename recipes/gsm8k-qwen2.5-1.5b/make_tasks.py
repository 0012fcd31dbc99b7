"""Writes train.jsonl and val.jsonl from GSM8K: `pip install datasets`, then `python make_tasks.py`."""

import json
from pathlib import Path

from datasets import load_dataset


def main() -> None:
    data = load_dataset("openai/gsm8k", "main")
    for file, split in (("train.jsonl", "train"), ("val.jsonl", "test")):
        rows = [
            {
                "id": f"{split}-{number}",
                "question": row["question"],
                "answer": float(row["answer"].rpartition("####")[2].replace(",", "")),
            }
            for number, row in enumerate(data[split])
        ]
        Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
