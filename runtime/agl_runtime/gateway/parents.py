"""Which earlier call a call continues, and whether it belongs to the agent's main work. Pure.

A tool-call id that an earlier answer of the attempt carried names that answer as the parent, even where the harness
wrote the text anew. Only the last thing that the assistant said counts; where ids name no single call nothing is
claimed, and the samples are built from token ids alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def parent_of(messages: Sequence[Any], answered: Mapping[str, Sequence[str]]) -> str | None:
    """The call whose answer is the last assistant message. `answered` maps tool-call ids to the calls that gave
    them."""
    candidates = [set(answered.get(call_id, ())) for call_id in _last_tool_call_ids(messages)]
    common = set.intersection(*candidates) if candidates else set()
    return common.pop() if len(common) == 1 else None


def is_auxiliary(asked: str, meant: str, *, policy: str, has_asked_policy: bool) -> bool:
    """Whether a call is a side job of the harness (a title, a safety check): its name means another model than the
    policy, because the configuration says so, or in an attempt that has asked for the policy. An agent that never does
    means the policy by any name."""
    return meant != policy and (has_asked_policy or meant != asked)


def as_sampled(message: Any, sampled: Mapping[str, str]) -> Any:
    """The message with the arguments of its tool calls as they were sampled, where the harness wrote the same JSON in
    other words; so the next prompt begins with what the model said. `sampled` maps tool-call ids to arguments."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_call_as_sampled(call, sampled) for call in calls]}


def _call_as_sampled(call: Any, sampled: Mapping[str, str]) -> Any:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    was, now = sampled.get(str(call.get("id"))), function.get("arguments")
    if was is None or not isinstance(now, str) or was == now or not _is_same(was, now):
        return call
    return {**call, "function": {**function, "arguments": was}}


def _is_same(one: str, other: str) -> bool:
    """Whether two texts are one JSON value. JavaScript has one kind of number: 1.0 comes back as 1."""
    try:
        first, second = (json.dumps(json.loads(text, parse_int=float), sort_keys=True) for text in (one, other))
    except (ValueError, RecursionError):
        return False
    return first == second


def _last_tool_call_ids(messages: Sequence[Any]) -> list[str]:
    said = [item for item in messages if isinstance(item, dict) and item.get("role") == "assistant"]
    calls = said[-1].get("tool_calls") if said else None
    ids = [call.get("id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [call_id for call_id in ids if isinstance(call_id, str) and call_id]
