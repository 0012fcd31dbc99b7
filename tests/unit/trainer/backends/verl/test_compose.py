from __future__ import annotations

from typing import Any

import pytest

from agl_runtime.trainer.backends.verl.compose import faults

KNOWN = {
    "trainer": {"project_name": "p", "nodes": 1, "fresh": True, "folder": None, "tools": "all", "ranks": "${of.it}"},
    "engine": {},
}


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("trainer.nodez", 1, "trainer.nodez, which verl does not know (it knows nodes)"),
        ("data", 1, "data, which verl does not know"),
        ("trainer.nodes.more", 1, "trainer.nodes.more, which verl does not know"),
        ("trainer.nodes", "two", "trainer.nodes to 'two', where verl has the number 1"),
        ("trainer.nodes", "1e-4", "trainer.nodes to '1e-4', where verl has the number 1 (write 1e-4 as 1.0e-4)"),
        ("trainer.nodes", True, "trainer.nodes to True, where verl has the number 1"),
        ("trainer.fresh", 1, "trainer.fresh to 1, where verl has true"),
        ("trainer", 1, "trainer to 1, where verl has a group of settings"),
    ],
)
def test_a_name_or_a_kind_that_verl_does_not_have_is_told(key: str, value: Any, fault: str):
    assert faults({key: value}, KNOWN) == [fault]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.nodes", 0.5),
        ("trainer.nodes", None),
        ("trainer.nodes", "${trainer.other}"),
        ("trainer.fresh", False),
        ("trainer.folder", ["a"]),
        ("trainer.tools", ["one"]),
        ("trainer.ranks", [1]),
        ("engine.of_the_server", "x"),
        ("engine.of_the_server.deep", 1),
        ("+trainer.nodez", 1),
        ("+trainer.nodes", "two"),
    ],
)
def test_what_may_be_meant_passes(key: str, value: Any):
    assert faults({key: value}, KNOWN) == []
