from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from agl_runtime.errors import ConfigError
from agl_runtime.trainer.data import Task, TaskOrder, load_tasks


def write(text: str | bytes) -> Path:
    file = Path("tasks.jsonl")
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def refusal(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tasks(write(text), "data.train")
    return str(caught.value)


def test_rows_come_in_file_order_with_their_ids_and_blank_lines_are_passed_over() -> None:
    file = write(
        '{"id": "a", "q": 1}\n\n{"data_id": 7}\r\n{"instance_id": "x__y-1"}\n{"q": 2}\n{"id": null, "data_id": "n"}'
    )
    assert [task.task_id for task in load_tasks(file, "data.train")] == ["a", "7", "x__y-1", "5", "n"]
    assert load_tasks(file, "data.train")[0] == Task("a", {"id": "a", "q": 1})


def test_the_first_tasks_count_where_a_limit_is_set() -> None:
    assert len(load_tasks(write('{"q": 1}\n{"q": 2}\n{"q": 3}\n'), "data.val", limit=2)) == 2


def test_a_missing_file_is_named_with_its_setting() -> None:
    with pytest.raises(
        ConfigError, match=r"none\.jsonl \(data\.train\) cannot be read: No such file.*Correct data\.train"
    ):
        load_tasks(Path("none.jsonl"), "data.train")


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_a_file_without_tasks_is_refused(text: str) -> None:
    assert "tasks.jsonl (data.train) holds no task" in refusal(text)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"q": 1', "Line 2 of tasks.jsonl is not valid JSON"),
        ('{"q": NaN}', "Line 2 of tasks.jsonl is not valid JSON"),
        ("[1]", "Line 2 of tasks.jsonl holds a list, not an object"),
        ('"text"', "Line 2 of tasks.jsonl holds a text, not an object"),
        ("null", "Line 2 of tasks.jsonl holds null, not an object"),
        ('{"id": ""}', "Line 2 of tasks.jsonl has an empty text as its id"),
        ('{"id": true}', "Line 2 of tasks.jsonl has a truth value as its id"),
        ('{"data_id": {"a": 1}}', "Line 2 of tasks.jsonl has an object as its data_id"),
        ('{"id": "a"}', "Line 2 of tasks.jsonl has the id 'a' of line 1"),
    ],
)
def test_a_line_that_is_no_task_is_named_with_what_it_holds(line: str, complaint: str) -> None:
    assert complaint in refusal('{"id": "a"}\n' + line + "\n")


def test_a_line_that_is_not_utf8_is_named() -> None:
    assert "Line 1 of tasks.jsonl is not valid JSON" in refusal(b'{"q": "\xff"}\n')


def order(n: int = 5, seed: int = 0, shuffle: bool = True) -> TaskOrder:
    return TaskOrder([Task(str(place), {}) for place in range(n)], seed, shuffle)


def test_every_epoch_takes_each_task_once_in_an_order_of_its_own() -> None:
    taken = [order(20).at(number).task_id for number in range(60)]
    assert set(Counter(taken).values()) == {3}
    assert taken[:20] != taken[20:40] != sorted(taken[20:40], key=int)


def test_the_order_depends_on_the_seed_alone() -> None:
    assert [order().at(number) for number in range(12)] == [order().at(number) for number in range(12)]
    assert [order(20, seed=1).at(number) for number in range(20)] != [
        order(20, seed=2).at(number) for number in range(20)
    ]


def test_without_shuffling_the_order_is_that_of_the_file() -> None:
    assert [order(3, shuffle=False).at(number).task_id for number in range(6)] == ["0", "1", "2", "0", "1", "2"]
