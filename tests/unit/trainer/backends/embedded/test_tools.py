from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.trainer.backends.embedded.tools import ToolCall, ToolReader, parse_call

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression":  "1+2"}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "calculator", "arguments"\n</tool_call>'


def read(parts: list[str]) -> tuple[str, list[tuple[int, str, str]]]:
    """Content, and the calls."""
    reader = ToolReader()
    pieces = [piece for part in parts for piece in reader.push(part)] + reader.finish()
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [(p.index, p.name, p.arguments) for p in pieces if isinstance(p, ToolCall)]


def test_arguments_are_kept_as_sampled_and_the_newline_before_the_call_is_not_content() -> None:
    assert read(["Let me see.\n" + CALL]) == ("Let me see.", [(0, "calculator", '{"expression":  "1+2"}')])


def test_several_calls_are_numbered_and_blanks_between_them_dropped() -> None:
    content, calls = read([f"{CALL}\n{CALL} \n"])
    assert content == ""
    assert [index for index, _, _ in calls] == [0, 1]


def test_call_ids_are_unique() -> None:
    pieces = ToolReader().push(CALL * 3)
    assert len({piece.call_id for piece in pieces if isinstance(piece, ToolCall)}) == 3


@pytest.mark.parametrize(
    "text",
    [
        f"so\n{BAD}",
        f"{BAD} and more",
        "no call at all\n",
        "unfinished <tool_call>\n{",
        "unfinished <tool_",
        "\n\n",
        "<tool_call></tool_call>",
        '<tool_call>{"name": "x", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "x"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "x", "arguments": {}} {}</tool_call>',
        '<tool_call>{"name": "x", "arguments": {"a": 1,}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_does_not_parse_is_content_unchanged(text: str) -> None:
    assert read([text]) == (text, [])


def test_text_after_a_call_is_content() -> None:
    assert read([CALL + "\ndone"]) == ("\ndone", [(0, "calculator", '{"expression":  "1+2"}')])


def test_content_comes_at_once_and_what_may_begin_a_call_is_held() -> None:
    reader = ToolReader()
    assert [reader.push(part) for part in ("Hello", " <b>", " <tool", "s>", "\n<tool_c")] == [
        ["Hello"],
        [" <b>"],
        [" "],
        ["<tools>"],
        [],
    ]


@given(
    st.lists(st.sampled_from(["text", "\n", " ", CALL, BAD, "<tool_call>", "</tool_call>", "<"]), max_size=6),
    st.integers(1, 30),
)
def test_the_same_text_reads_the_same_however_it_arrives(parts: list[str], size: int) -> None:
    text = "".join(parts)
    assert read([text[at : at + size] for at in range(0, len(text), size)]) == read([text])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


NAME = '"name" : "f}{"'


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.sampled_from([None, 0, 2]), st.booleans())
def test_any_json_object_is_cut_out_byte_for_byte(arguments: dict[str, object], indent: int | None, late: bool) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=False)
    fields = [NAME, f'"arguments":  {written}']
    text = " {" + " , ".join(reversed(fields) if late else fields) + "}\n"
    assert parse_call(text) == ("f}{", written)
