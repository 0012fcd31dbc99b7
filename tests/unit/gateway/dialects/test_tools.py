"""Names of tools and the input of freeform tools, there and back."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.gateway.dialects.tools import (
    FreeformInput,
    Tool,
    ToolNames,
    arguments_of,
    freeform_input,
    tool_of,
)

NAMES = st.text("ab_. ", min_size=1, max_size=4)
TOOLS = st.builds(Tool, st.sampled_from(["function", "custom"]), st.sampled_from(["", "a", "a__b", "b c"]), NAMES)
PATCH = '*** Begin Patch\n+"quoted" \\ back\ttab é 😀 \x07\n*** End'


def in_pieces(arguments: str, *cuts: int) -> tuple[str, str]:
    """What was told while it came, and what of it at the end."""
    live = FreeformInput()
    edges = [0, *cuts, len(arguments)]
    told = "".join(live.feed(arguments[start:end]) for start, end in pairwise(edges))
    return told, live.rest()


def test_a_plain_function_keeps_its_name_and_a_namespaced_tool_says_where_it_is_from() -> None:
    tools = [Tool("function", "", "read"), Tool("custom", "", "apply_patch"), Tool("function", "mcp__fs", "read")]
    names = ToolNames(tools)
    assert [names.shown(tool) for tool in tools] == ["read", "apply_patch", "mcp__fs__read"]
    assert names.way_back() == {
        "apply_patch": ["custom", "", "apply_patch"],
        "mcp__fs__read": ["function", "mcp__fs", "read"],
    }


def test_tools_that_would_be_shown_alike_get_names_of_their_own() -> None:
    tools = [
        Tool("function", "", "a__b__c"),
        Tool("function", "a__b", "c"),
        Tool("function", "a", "b__c"),
        Tool("custom", "", "a__b__c"),
    ]
    shown = [ToolNames(tools).shown(tool) for tool in tools]
    assert shown[0] == "a__b__c"
    assert len(set(shown)) == 4
    assert [ToolNames(tools[::-1]).shown(tool) for tool in tools] == shown


def test_a_long_or_unfit_name_within_a_namespace_is_shown_as_one_that_model_servers_take() -> None:
    tool = Tool("function", "a b", "x" * 80)
    shown = ToolNames([tool]).shown(tool)
    assert shown.startswith("a_b__xxx")
    assert len(shown) == 64
    assert tool_of(ToolNames([tool]).way_back(), shown) == tool


def test_a_name_that_the_model_made_up_is_a_plain_function() -> None:
    assert tool_of({}, "made_up") == Tool("function", "", "made_up")


@given(st.sets(TOOLS, max_size=8))
def test_every_tool_is_found_again_by_what_is_shown_of_it(tools: set[Tool]) -> None:
    names = ToolNames(tools)
    shown = {tool: names.shown(tool) for tool in tools}
    assert len(set(shown.values())) == len(tools)
    assert all(tool_of(names.way_back(), name) == tool for tool, name in shown.items())


@pytest.mark.parametrize("arguments", [json.dumps({"input": PATCH}), f' {{ "input" :\n"{json.dumps(PATCH)[1:-1]}" }} '])
def test_the_input_is_the_same_wherever_its_arguments_are_cut(arguments: str) -> None:
    assert freeform_input(arguments) == PATCH
    for first in range(len(arguments) + 1):
        assert in_pieces(arguments, first) == (PATCH, "")
    assert in_pieces(arguments, *range(len(arguments))) == (PATCH, "")


@given(st.text(), st.booleans(), st.data())
def test_any_text_comes_back_from_its_arguments(text: str, is_ascii: bool, data: st.DataObject) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(arguments)), max_size=5)))
    assert in_pieces(arguments, *cuts) == (text, "")
    assert freeform_input(arguments_of("input", text)) == text


@given(st.text('{"input\\u: dD8fcqn}', max_size=40), st.integers(0, 40))
def test_what_was_told_piece_by_piece_begins_what_is_told_as_a_whole(arguments: str, cut: int) -> None:
    live = FreeformInput()
    told = live.feed('{"input":"' + arguments[:cut]) + live.feed(arguments[cut:])
    assert freeform_input('{"input":"' + arguments) == told + live.rest()
    told.encode()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("*** Begin Patch", "*** Begin Patch"),
        ('["x"]', '["x"]'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"why": "so", "input": "x"}', '{"why": "so", "input": "x"}'),
        ('{"input": "x", "why": "so"}', "x"),
        ('{"input": "a\nb\\d"}', "a\nb\\d"),
        ('{"input": "cut o', "cut o"),
        ('{"input": "half \\ud83d"}', "half \ufffd"),
        ('{"input": "\\u12"}', "\\u12"),
        ("", ""),
    ],
)
def test_arguments_that_are_not_one_input_are_read_as_well_as_can_be(arguments: str, text: str) -> None:
    assert freeform_input(arguments) == text
