from __future__ import annotations

from pathlib import Path

import pytest

from agl_cli.supervisor import after_exit, last_error, part_command


def test_pauses_grow_until_a_part_is_given_up() -> None:
    assert [after_exit(1, deaths) for deaths in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, None]


@pytest.mark.parametrize("code", [2, 3])
def test_configuration_and_preconditions_are_not_retried(code: int) -> None:
    assert after_exit(code, 1) is None


def test_the_same_error_twice_is_not_tried_again() -> None:
    assert after_exit(1, 2, same_error=True) is None


def test_the_last_error_line_is_told_without_its_prefix(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text(
        "2026-01-01 00:00:00,000 ERROR   agl_runtime.trainer: The old one.\n"
        "2026-01-01 00:00:01,000 ERROR   agl_runtime.trainer: No model: give one.\n"
        "2026-01-01 00:00:01,000 INFO    agl_runtime.trainer: bye\n"
    )
    assert last_error(log, 0) == "No model: give one."
    assert last_error(log, log.stat().st_size) is None


def test_an_uncaught_exception_is_told_by_its_message(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("Traceback (most recent call last):\n  File ...\nRuntimeError: boom\n\n")
    assert last_error(log, 0) == "RuntimeError: boom"


def test_a_part_gets_the_project_and_every_setting(tmp_path: Path) -> None:
    command = part_command("trainer", tmp_path, ["train.lr=1", "train.seed=2"], "--mode", "eval", once=True)
    assert command.argv[1:] == (
        *("-m", "agl_runtime.trainer", "--root", str(tmp_path), "--with-parent", "--mode", "eval"),
        *("--set", "train.lr=1", "--set", "train.seed=2"),
    )
