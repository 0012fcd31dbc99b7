"""Tools that a model can only be shown as functions, and the way back to what the harness calls them. Pure.

A freeform tool becomes a function with the one string `input`; a tool within a namespace gets a name of its own. A
plain function keeps its name always, any other tool where nothing else is called so; then its name ends in a digest of
what it is, so that it does not depend on which tools stand beside it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import orjson

from agl_runtime.gateway.internal import Json

UNPARSED = "unparsed_arguments"  # what a call's arguments hold where they were no JSON object
_INPUT = {"type": "string", "description": "The tool's input, as free text."}
FREEFORM_SCHEMA: Json = {"type": "object", "properties": {"input": _INPUT}, "required": ["input"]}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class Tool(NamedTuple):
    """A tool as the harness names it; `namespace` is empty outside of any."""

    kind: Literal["function", "custom"]
    namespace: str
    name: str


class ToolNames:
    """The names under which the model sees one request's tools."""

    def __init__(self, tools: Collection[Tool]) -> None:
        self._known = frozenset(tools)
        self._wanted = Counter(_wanted(tool) for tool in self._known)

    def shown(self, tool: Tool) -> str:
        """Also for a tool of the history that is no longer offered."""
        wanted = _wanted(tool)
        if tool.kind == "function" and not tool.namespace:
            return wanted
        is_free = self._wanted[wanted] + (tool not in self._known) <= 1
        if is_free and (not tool.namespace or _NAME.fullmatch(wanted)):
            return wanted
        digest = hashlib.blake2b(orjson.dumps(list(tool)), digest_size=4).hexdigest()
        return f"{re.sub(r'[^a-zA-Z0-9_-]', '_', wanted)[:55]}_{digest}"

    def way_back(self) -> dict[str, list[str]]:
        """For `tool_of`, fit to be recorded: the tools that are not plain functions, by the name that is shown."""
        return {self.shown(tool): list(tool) for tool in sorted(self._known) if tool != _plain(self.shown(tool))}


def tool_of(way_back: Mapping[str, Sequence[Any]], shown: str) -> Tool:
    """What the model means by a name; one that it made up is taken for a plain function's."""
    return Tool(*way_back[shown]) if shown in way_back else _plain(shown)


def _plain(name: str) -> Tool:
    return Tool("function", "", name)


def _wanted(tool: Tool) -> str:
    return f"{tool.namespace}__{tool.name}" if tool.namespace else tool.name


def is_object(text: str) -> bool:
    """Whether a call's arguments are a JSON object, as every function's have to be."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def arguments_of(key: str, text: str) -> str:
    """A call's arguments that hold one text: a freeform tool's `input`, or `UNPARSED`."""
    return json.dumps({key: text}, ensure_ascii=False)


def freeform_input(arguments: str) -> str:
    """The input within a function's arguments; all of the arguments where they do not begin with one."""
    live = FreeformInput()
    text = live.feed(arguments) + live.rest()
    return text if live.begun else arguments


class FreeformInput:
    """Reads the string out of `{"input": "..."}` while it comes, in pieces cut anywhere.

    Begins only where `input` comes first; what is no JSON within the string (bare line breaks, unknown escapes, half
    characters) is taken as it was meant.
    """

    _HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    # One piece of a string; an escape that could still become longer is none yet.
    _PIECE = re.compile(
        r'[^"\\]+'
        r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
        r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\?\Z|\\u[0-9a-fA-F]{0,3}\Z)"
        r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
        r"|\\u(?![0-9a-fA-F]{0,3}\Z|[0-9a-fA-F]{4})"
        r"|\\[^u]",
        re.DOTALL,
    )
    _ESCAPES: ClassVar = {f"\\{key}": value for key, value in zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True)}

    def __init__(self) -> None:
        self.begun = False
        self._ended = False
        self._left = ""

    def feed(self, piece: str) -> str:
        """What of the string the piece completes."""
        if self._ended:
            return ""
        self._left += piece
        if not self.begun:
            head = self._HEAD.match(self._left)
            if head is None:
                return ""
            self.begun, self._left = True, self._left[head.end() :]
        out, at = [], 0
        while found := self._PIECE.match(self._left, at):
            out.append(self._decoded(found[0]))
            at = found.end()
        self._left = self._left[at:]
        self._ended = self._left.startswith('"')
        return "".join(out)

    def rest(self) -> str:
        """What was held back, once nothing more comes."""
        return "" if self._ended or not self.begun else self._left

    def _decoded(self, piece: str) -> str:
        if not piece.startswith("\\u") or len(piece) < 6:
            return self._ESCAPES.get(piece, piece)
        units = bytes.fromhex(piece.replace("\\u", ""))
        return units.decode("utf-16-be", errors="replace")
