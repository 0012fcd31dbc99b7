"""Conversations as chat messages, and whether an agent sent back the history that it had. Pure.

Ids alone show that a history reads differently (`template`, see `agl_runtime.samples.diagnose`), not who changed it.
Where the later call's messages differ from those of the earlier one and its answer, or its tools do, the agent did: the
cause is `rewritten`. How a call or white space is spelled, and reasoning, which many agents never send back, count for
nothing here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl_runtime.samples.types import RolloutSamples, Sample

REWRITTEN = "rewritten"
Message = Mapping[str, Any]
Request = Mapping[str, Any]


def conversation(request: Request) -> dict[str, Any]:
    """A call with its answer as a chat body, whatever the harness spoke: its `messages`, in the roles under which the
    model got them, and `tools` where there were some."""
    from agl_runtime.gateway.dialects import all_dialects  # with it comes the web framework, which is slow to load
    from agl_runtime.gateway.prepare import with_known_role

    (dialect,) = (each for each in all_dialects().values() if each.name == request["dialect"])
    chat = dialect.conversation(request["request"], request["response"])
    messages = [with_known_role(message) for message in chat["messages"]]
    return {"messages": messages} | ({"tools": chat["tools"]} if chat.get("tools") else {})


def asked(request: Request) -> dict[str, Any]:
    """The same without its answer."""
    return conversation({**request, "response": {}})


def judged(samples: RolloutSamples, requests: Mapping[str, Request]) -> RolloutSamples:
    """With the cause `rewritten` in place of `template` where the agent did it. `requests` are those of the calls, by
    their ids."""
    rows = tuple(_judged(sample, requests) for sample in samples.samples)
    found = sum(sample.split == REWRITTEN for sample in rows)
    splits = Counter(samples.report.splits) + Counter({REWRITTEN: found}) - Counter(template=found)
    return replace(samples, samples=rows, report=replace(samples.report, splits=dict(splits)))


def is_rewritten(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> bool:
    """Whether the chat `later` has other tools or, as far as it reaches, other messages than `earlier`."""
    pairs = zip(earlier["messages"], later["messages"], strict=False)
    return earlier.get("tools", []) != later.get("tools", []) or any(_said(one) != _said(other) for one, other in pairs)


def text_of(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, list):
        return " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in content if isinstance(part, dict))
    return json.dumps(content, ensure_ascii=False)


def _judged(sample: Sample, requests: Mapping[str, Request]) -> Sample:
    broke = sample.broke
    if broke is None or broke.cause != "template":
        return sample
    earlier, later = requests.get(broke.earlier), requests.get(broke.call)
    if earlier is None or later is None or not (_is_whole(earlier) and _is_whole(later)):
        return sample
    is_agents = is_rewritten(conversation(earlier), asked(later))
    return replace(sample, broke=replace(broke, cause=REWRITTEN)) if is_agents else sample


def _is_whole(request: Request) -> bool:
    """Whether a call's body holds all messages of its conversation, as messages."""
    body = request["request"]
    items: Sequence[Any] = body.get("input") if isinstance(body.get("input"), list) else []
    refers = any(isinstance(item, dict) and item.get("type") == "item_reference" for item in items)
    return request["dialect"] != "completions" and not body.get("previous_response_id") and not refers


def _said(message: Message) -> tuple[Any, ...]:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    calls = [(function.get("name"), _value(function.get("arguments"))) for function in functions]
    return message.get("role"), "".join(text_of(message.get("content")).split()), calls


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
