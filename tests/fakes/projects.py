"""Small agl projects on disk for tests of the command line: an agent that needs only the standard library, a reward
function, task files, and a folder that looks like a model without holding one."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

AGENT = """
import json, os, sys, urllib.request

body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""
REWARD = """
def reward(task, output):
    return float(task["answer"] in output["stdout"])
"""
TASKS = [{"id": f"t{number}", "question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(3)]


def make_project(root: Path, settings: Mapping[str, Mapping[str, Any]] | None = None) -> Path:
    """A project that passes every check; `settings` are merged into its agl.yaml section by section."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "agent.py").write_text(AGENT, encoding="utf-8")
    (root / "reward.py").write_text(REWARD, encoding="utf-8")
    write_tasks(root / "tasks.jsonl", TASKS)
    write_tasks(root / "val.jsonl", TASKS[:2])
    make_model_folder(root / "model")
    values: dict[str, dict[str, Any]] = {
        "agent": {"command": [sys.executable, "agent.py", "{question}"], "concurrency": 2, "attempts": 1},
        "reward": {"function": "reward.py:reward", "python": sys.executable},
        "data": {"train": "tasks.jsonl", "val": "val.jsonl"},
        "model": {"path": "model"},
        "train": {"steps": 2, "groups_per_step": 2, "group_size": 2},
    }
    for section, entries in (settings or {}).items():
        values[section] = {**values.get(section, {}), **entries}
    (root / "agl.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return root


def write_tasks(file: Path, tasks: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")


def make_model_folder(folder: Path, shape: tuple[int, ...] = (100, 10)) -> Path:
    """What the checks look at: settings, the header of one weights file, a tokenizer, a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    header = json.dumps({"weight": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    return folder
