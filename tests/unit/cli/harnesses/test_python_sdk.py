from __future__ import annotations

import json
from pathlib import Path

from agl_cli.harnesses.python_sdk import HARNESS
from agl_cli.harnesses.repository import look

AGENT = 'import sys\nfrom openai import OpenAI\nif __name__ == "__main__":\n    OpenAI(base_url="http://x")\n'
TASK = {"id": "1", "question": "2+2?", "answer": "4"}


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_py", ".py").replace("_jsonl", ".jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_the_entry_command_and_task_field_are_found(tmp_path: Path) -> None:
    root = write(
        tmp_path / "p", agent_py=AGENT.replace("import sys", "import sys; sys.argv"), tasks_jsonl=json.dumps(TASK)
    )
    found = HARNESS.integrate(look(root), ())
    assert found is not None
    assert found.command == ("python", "agent.py", "{question}")
    assert [edit.path for edit in found.edits] == ["agent.py"]
    assert found.notes == ()


def test_an_option_of_the_same_name_is_used(tmp_path: Path) -> None:
    source = AGENT.replace("import sys", "import argparse\nargparse.ArgumentParser().add_argument('--question')")
    root = write(tmp_path / "p", agent_py=source, tasks_jsonl=json.dumps(TASK))
    found = HARNESS.integrate(look(root), ())
    assert found is not None
    assert found.command == ("python", "agent.py", "--question={question}")


def test_the_main_file_is_started_where_a_library_file_imports_openai(tmp_path: Path) -> None:
    root = write(
        tmp_path / "p",
        llm_py="import openai\nclient = openai.OpenAI()\n",
        main_py="import sys\nimport llm\nif __name__ == '__main__':\n    print(sys.argv)\n",
        tests__test_it_py="if __name__ == '__main__':\n    pass\n",
    )
    found = HARNESS.integrate(look(root), ())
    assert found is not None
    assert found.command == ("python", "main.py")
    assert found.edits == ()


def test_agents_of_anthropics_package_are_known_and_all_packages_named(tmp_path: Path) -> None:
    source = "import anthropic\nanthropic.Anthropic(base_url='http://x')\n"
    found = HARNESS.integrate(look(write(tmp_path / "one", agent_py=source)), ())
    assert found is not None
    assert (found.harness, found.evidence) == ("anthropic SDK (Python)", "imported by agent.py")
    assert [edit.path for edit in found.edits] == ["agent.py"]
    both = HARNESS.integrate(look(write(tmp_path / "both", agent_py=source, judge_py="import openai\n")), ())
    assert both is not None
    assert both.harness == "anthropic and openai SDK (Python)"


def test_a_repository_without_the_package_is_none_of_its_business(tmp_path: Path) -> None:
    assert (
        HARNESS.integrate(look(write(tmp_path / "p", agent_py="print('openai')\n", broken_py="import openai (")), ())
        is None
    )


def test_task_files_are_told_apart_by_name_and_environments_are_skipped(tmp_path: Path) -> None:
    root = write(
        tmp_path / "p",
        data__val_jsonl=json.dumps(TASK),
        data__train_jsonl="\n" + json.dumps(TASK),
        data__notes_jsonl="not json",
        venv__lib__x_jsonl=json.dumps(TASK),
    )
    tasks = look(root).tasks
    assert (tasks.train, tasks.val) == ("data/train.jsonl", "data/val.jsonl")
    assert (tasks.input_field, tasks.answer_field) == ("question", "answer")
