from __future__ import annotations

import json
from pathlib import Path

import pytest

from agl_cli.project import MetricsTail, open_project, parse_settings, read_summary
from agl_runtime.errors import ConfigError
from fakes.projects import make_project


def row(step: int, elapsed_s: float = 0.0) -> dict[str, object]:
    return {"kind": "step", "run_id": "r", "step": step, "elapsed_s": elapsed_s}


def write(folder: Path, *rows: dict[str, object], tail: str = "") -> None:
    text = "".join(json.dumps(item) + "\n" for item in rows) + tail
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(text)


def test_rows_are_read_once_and_only_when_whole(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path)
    assert tail.read() == []
    write(tmp_path, row(1), tail='{"kind": "st')
    assert tail.read() == [row(1)]
    write(tmp_path, tail='ep", "run_id": "r", "step": 2, "elapsed_s": 0.0}\n')
    assert tail.read() == [row(2)]
    assert tail.read() == []


def test_rows_from_before_can_be_left_out(tmp_path: Path) -> None:
    write(tmp_path, row(1))
    tail = MetricsTail(tmp_path, from_end=True)
    write(tmp_path, row(2))
    assert tail.read() == [row(2)]


def test_a_file_written_anew_shows_only_what_is_new(tmp_path: Path) -> None:
    write(tmp_path, row(1), row(2, 5.0))
    tail = MetricsTail(tmp_path)
    tail.read()
    fresh = tmp_path / "fresh"
    fresh.write_text(json.dumps(row(1)) + "\n", encoding="utf-8")
    fresh.replace(tmp_path / "metrics.jsonl")
    assert tail.read() == []
    write(tmp_path, row(2, 9.0))
    assert tail.read() == [row(2, 9.0)]


def test_a_line_cut_by_a_crash_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, tail='{"kind": "ste\n')
    write(tmp_path, row(3))
    assert MetricsTail(tmp_path).read() == [row(3)]


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_summary_that_is_none_is_none(tmp_path: Path, content: str) -> None:
    assert read_summary(tmp_path) is None
    (tmp_path / "summary.json").write_text(content, encoding="utf-8")
    assert read_summary(tmp_path) is None


def test_settings_keep_what_follows_the_first_equals_sign() -> None:
    assert parse_settings(["agent.command=a=b", "train.lr=1", "train.lr=2"]) == {
        "agent.command": "a=b",
        "train.lr": "2",
    }


@pytest.mark.parametrize("item", ["train.lr", "=1", " =1"])
def test_a_setting_without_path_or_value_is_refused(item: str) -> None:
    with pytest.raises(ConfigError, match=r"names no value\. Write it as --set train\.lr=1e-5\."):
        parse_settings([item])


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_project(tmp_path / "project", {"train": {"seed": 1, "steps": 1, "lr": 1.0}})
    monkeypatch.setenv("AGL_CFG_TRAIN__SEED", "2")
    monkeypatch.setenv("AGL_CFG_TRAIN__STEPS", "2")
    train = open_project(root, ["train.seed=3"]).config.train
    assert (train.seed, train.steps, train.lr) == (3, 2, 1.0)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone is no folder"):
        open_project(tmp_path / "gone")
