"""Runs in the user's own interpreter, once for each reward: imports the reward function's file and calls it.

Usage: reward_child.py REQUEST RESPONSE, two JSON files. The request holds `file`, `name` and, when the function is to
be called and not only looked at, `arguments`, of which it gets those that it has parameters for. The response holds
`parameters` (their names), or `reward` and `parts`, or `error`. What the function prints does not go into these files.

Standard library only, Python 3.8 or newer; nothing of agl is imported.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping
from numbers import Real
from typing import Any, Awaitable, Callable  # noqa: UP035 - read by Python 3.8 too

OFFERED = ("task", "workspace", "exit", "output", "events")
LARGEST = 1e100  # a group's variance, of squares, must stay finite


class Record(dict):  # type: ignore[type-arg]  # Python 3.8 cannot subscript it
    """A mapping whose entries can also be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Refused(Exception):
    """What is wrong with the function or with its answer, as a sentence."""


def load(file: str, name: str) -> Callable[..., Any]:
    sys.path[0] = os.path.dirname(os.path.abspath(file))
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(file))[0], file)
    if spec is None or spec.loader is None:
        raise Refused("it is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise Refused(f"the file defines no function `{name}`.")
    return function  # type: ignore[no-any-return]


def parameters(function: Callable[..., Any]) -> list[str]:
    """The names among OFFERED that the function takes."""
    names = []
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.VAR_KEYWORD:
            return list(OFFERED)
        if each.kind is each.VAR_POSITIONAL:
            continue
        if each.kind is each.POSITIONAL_ONLY or (each.name not in OFFERED and each.default is each.empty):
            raise Refused("it asks for `{}`; agl passes {} by name.".format(each.name, ", ".join(OFFERED)))
        if each.name in OFFERED:
            names.append(each.name)
    return names


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    result = function(**{name: record(arguments[name]) for name in parameters(function)})
    if inspect.isawaitable(result):
        result = asyncio.run(awaited(result))
    if not isinstance(result, Mapping):
        return {"reward": number(result, "its result"), "parts": {}}
    if "reward" not in result:
        raise Refused("its mapping has no `reward`.")
    parts = {str(name): number(value, f"`{name}`") for name, value in result.items() if name != "reward"}
    return {"reward": number(result["reward"], "`reward`"), "parts": parts}


async def awaited(result: Awaitable[Any]) -> Any:
    return await result


def record(value: Any) -> Any:
    """The value with every mapping in it as a Record."""
    if isinstance(value, dict):
        return Record((key, record(item)) for key, item in value.items())
    return [record(item) for item in value] if isinstance(value, list) else value


def number(value: Any, what: str) -> float:
    if not isinstance(value, Real) and hasattr(value, "item"):  # an array's or a tensor's scalar
        value = value.item()
    if not isinstance(value, Real):
        raise Refused(f"{what} is {type(value).__name__}, not a number.")
    if not abs(value) <= LARGEST:  # type: ignore[operator]  # also for NaN
        raise Refused(f"{what} is {value}, not a usable number: finite, and at most {LARGEST:g}.")
    return float(value)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Every error of the function is an answer."""
    try:
        function = load(request["file"], request["name"])
        if "arguments" in request:
            return call(function, request["arguments"])
        return {"parameters": parameters(function)}
    except Refused as error:
        return {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        lines = "".join(traceback.format_exception_only(type(error), error))
        return {"error": f"it raised {' '.join(lines.split())}."}


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    given = json.dumps(answer(request))
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(given)


if __name__ == "__main__":
    main()
