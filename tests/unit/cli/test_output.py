from __future__ import annotations

import json
import sys

import pytest

from agl_cli import output


def test_tables_are_plain_columns_where_no_one_looks(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_table(("name", "n"), [("a", 1), ("longer", None)])
    assert capsys.readouterr().out == "name    n\na       1\nlonger\n"


def test_tables_on_a_terminal_keep_markup_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    output.emit_table(("name", "text"), [("a", "[bold]x[/bold]")])
    shown = capsys.readouterr().out
    assert "[bold]x[/bold]" in shown
    assert "\x1b[3" not in shown  # NO_COLOR is set in tests


def test_json_keeps_the_order_of_keys_and_every_character(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_json({"b": "東京", "a": None})
    shown = capsys.readouterr().out
    assert shown.index('"b"') < shown.index('"a"')
    assert "東京" in shown
    assert json.loads(shown) == {"b": "東京", "a": None}


def test_json_lines_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit_json_line({"text": "a\nb"})
    output.emit_json_line({})
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"text": "a\nb"}, {}]
