"""What a Responses request leaves to the record, and which answer it goes on from. Pure.

Ids of output items are made from their response's id (`responses_answer`), so an item's id names its response, as does
the seal of its reasoning where a harness sends items without their ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agl_runtime.gateway.dialects.base import Recorded
from agl_runtime.gateway.dialects.openai import require
from agl_runtime.gateway.dialects.reasoning import unseal
from agl_runtime.gateway.internal import CallRefused, Json

_ITEM_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})(?:_[0-9]+)?")
_SAID = frozenset({"reasoning", "function_call", "custom_tool_call"})


def items_of(body: Json) -> list[Json]:
    """The input as items. Raises CallRefused."""
    given = body.get("input")
    return [{"role": "user", "content": given}] if isinstance(given, str) else objects("input", given)


def objects(name: str, given: Any) -> list[Json]:
    require(given is None or isinstance(given, list), f"`{name}` must be a list.")
    require(all(isinstance(item, dict) for item in given or []), f"`{name}` must hold objects.")
    return given or []


def named(body: Json) -> set[str]:
    """The responses without which the input is not whole. Raises CallRefused."""
    previous = body.get("previous_response_id")
    require(isinstance(previous, str | None), "`previous_response_id` must be a text.")
    ids = [item.get("id") for item in items_of(body) if _is_reference(item)]
    return {_response_of(item_id) or str(item_id) for item_id in ids} | ({previous} if previous else set())


def completed(body: Json, recorded: Mapping[str, Recorded]) -> Json:
    """The body with its whole input: what the previous response went on from, what that said, and each item that is
    only named. Raises CallRefused as the API does for what was never said in this attempt, or not to be stored."""
    kept = {
        name: (request, response)
        for name, (request, response) in recorded.items()
        if request.get("store") is not False and "output" in response  # else it is an answer of another API
    }
    items = [_item(item.get("id"), kept) if _is_reference(item) else item for item in items_of(body)]
    if previous := body.get("previous_response_id"):
        if previous not in kept:
            raise _not_found("Previous response", previous, "previous_response_id", 400, "previous_response_not_found")
        request, response = kept[previous]
        items = [*items_of(request), *response["output"], *items]
    return {**body, "input": items}


def continued(items: list[Json]) -> str | None:
    """The response that the last run of the assistant's items is of, where they name a single one."""
    names: set[str | None] = set()
    for item in reversed(items):
        if str(item.get("type")) in _SAID or item.get("role") == "assistant":
            names.add(_response_of(item.get("id")) or (unseal(item.get("encrypted_content")) or (None,))[0])
        elif names:
            break
    names.discard(None)
    return names.pop() if len(names) == 1 else None


def _is_reference(item: Json) -> bool:
    return item.get("type") == "item_reference" or item.keys() == {"id"}


def _response_of(item_id: Any) -> str | None:
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return f"resp_{found[1]}" if found else None


def _item(item_id: Any, recorded: Mapping[str, Recorded]) -> Json:
    _, response = recorded.get(_response_of(item_id) or "", ({}, {}))
    for item in response.get("output", []):
        if item["id"] == item_id:
            return dict(item)
    raise _not_found("Item", item_id, "input", 404)


def _not_found(what: str, name: Any, param: str, status: int, code: str | None = None) -> CallRefused:
    fix = "Name what was answered in this attempt with `store` true, or send its items themselves."
    return CallRefused(f"{what} with id '{name}' not found.", fix, http_status=status, code=code, param=param)
