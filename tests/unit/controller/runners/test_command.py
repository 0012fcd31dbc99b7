"""Command lines and variables with a task's fields in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.controller.runners.command import MOST_BYTES, TaskPlace, render, split_command
from agl_runtime.errors import ConfigError


def rendered(template: str, task: Any) -> str:
    return render(template, TaskPlace(task, "t1", "/tmp/task.json"), "agent.command")


def refusal(template: str, task: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        rendered(template, task)
    return str(caught.value)


def test_a_string_is_split_as_a_shell_would_and_a_list_is_taken_as_it_is() -> None:
    assert split_command("python 'my agent.py' --q {question}") == ["python", "my agent.py", "--q", "{question}"]
    assert split_command(["python", "my agent.py", "$HOME"]) == ["python", "my agent.py", "$HOME"]


@pytest.mark.parametrize("command", ["python 'agent.py", "", []])
def test_a_command_that_cannot_be_split_is_refused(command: str | list[str]) -> None:
    with pytest.raises(ConfigError, match=r"agent\.command"):
        split_command(command)


@given(st.text().filter(lambda text: "\0" not in text))
def test_any_text_arrives_intact_in_one_argument(text: str) -> None:
    assert rendered("--question={question}", {"question": text}) == f"--question={text}"


def test_values_that_are_no_text_are_written_as_json() -> None:
    task = {"n": 3, "ok": True, "none": None, "list": [1, "é"], "deep": {"a": [{"b": "x"}]}}
    assert rendered("{n} {ok} {none} {list}", task) == '3 true null [1, "é"]'
    assert json.loads(rendered("{deep}", task)) == task["deep"]


def test_nested_fields_and_items_are_reached_by_dots() -> None:
    assert rendered("{deep.a.0.b}", {"deep": {"a": [{"b": "x"}]}}) == "x"


def test_a_field_whose_own_name_has_a_dot_is_found() -> None:
    assert rendered("{a.b}", {"a.b": "whole", "a": {"b": "nested"}}) == "whole"


def test_doubled_braces_are_literal_and_the_task_file_has_a_name() -> None:
    assert rendered('{{"q": "{q}"}} {task_file}', {"q": "x"}) == '{"q": "x"} /tmp/task.json'


def test_a_value_is_never_read_as_a_template() -> None:
    assert rendered("{q}", {"q": "{task_file} {{"}) == "{task_file} {{"


def test_an_unknown_field_names_the_task_the_setting_and_what_there_is() -> None:
    assert refusal("{answer}", {"question": 1, "id": 2}) == (
        "Task t1 has no field `answer`, which agent.command names; it has question, id. "
        "Correct the name, or write {{ and }} for literal braces."
    )


def test_a_task_that_is_no_mapping_has_no_fields() -> None:
    assert "it has none" in refusal("{question}", "just text")


@pytest.mark.parametrize("template", ["{", "a } b", "{{}", "{a{b}"])
def test_a_single_brace_is_refused_with_the_way_to_write_it(template: str) -> None:
    assert "Write {{ and }} for literal braces." in refusal(template, {"b": "x"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a\0b", "holds a NUL character, which no argument can carry."),
        ("a\ud800b", "holds half a character"),
        ("x" * (MOST_BYTES + 1), f"is {MOST_BYTES + 1} bytes long; an argument or variable holds {MOST_BYTES}."),
    ],
)
def test_what_no_argument_can_carry_is_refused_in_favour_of_the_task_file(text: str, problem: str) -> None:
    said = refusal("{question}", {"question": text})
    assert said.startswith("agent.command of task t1 ")
    assert problem in said
    assert "Give the agent {task_file}" in said


def test_the_longest_argument_is_allowed() -> None:
    assert len(rendered("{question}", {"question": "x" * MOST_BYTES})) == MOST_BYTES
