"""A model server's answer as the Responses API tells it: the response object and its output items. Pure.

Ids of items are made from the response's id, so that a stream and its whole answer name the same things.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl_runtime.gateway.dialects.reasoning import seal
from agl_runtime.gateway.dialects.said import SaidCall, calls_of, reasoning_of, text_of
from agl_runtime.gateway.dialects.tools import freeform_input, is_object, tool_of
from agl_runtime.gateway.internal import Answer, Json, ModelRequest

# What holds a call's input, and the stem of the events that tell it.
CALLS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}
# The parts of text items, and the stem of the events that tell them.
TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}
MOST_TOKENS = 2**53  # that a count is taken for one
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ALWAYS: Json = {"object": "response", "status": "in_progress", "output": [], "background": False}
_ALWAYS |= {"truncation": "disabled", **dict.fromkeys(("error", "incomplete_details", "usage"))}
# Told again as they were asked, or with the API's own default.
_ECHOED: Json = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}, "store": True}
_ECHOED |= {"text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None}}
_ECHOED |= dict.fromkeys(
    ("instructions", "temperature", "top_p", "top_logprobs", "max_output_tokens", "max_tool_calls")
)
_ECHOED |= dict.fromkeys(("previous_response_id", "prompt_cache_key", "safety_identifier", "service_tier", "user"))


def head(request: ModelRequest) -> Json:
    """The response before the model said anything."""
    asked, side = request.original, request.side
    echoed = {name: default if asked.get(name) is None else asked[name] for name, default in _ECHOED.items()}
    named = {"id": side["response_id"], "created_at": side["created_at"], "model": request.model}
    return {**named, **_ALWAYS, **echoed}


def whole(request: ModelRequest, answer: Answer) -> Json:
    """Also of an answer that broke off."""
    reason = _INCOMPLETE.get(answer.finish_reason or "")
    is_whole = answer.finish_reason is not None and reason is None
    status = "completed" if is_whole else "incomplete"
    message = answer.response["choices"][0].get("message") or {}
    return {
        **head(request),
        "status": status,
        "incomplete_details": {"reason": reason} if reason else None,
        "output": _output(request, message, status),
        "usage": _usage(answer),
    }


def _output(request: ModelRequest, message: Json, status: str) -> list[Json]:
    """Reasoning, text and calls, or at least an empty text. A call that was cut off is none: nobody could act on it."""
    said = calls_of(message)
    is_cut = bool(said) and status == "incomplete" and not is_object(said[-1].arguments)
    calls = [call_item(request.side, number, call) for number, call in enumerate(said[:-1] if is_cut else said)]
    reasoning, text = reasoning_of(message), text_of(message)
    texts = [("reasoning", reasoning)] if reasoning else []
    if text or not (reasoning or calls):
        texts.append(("message", text))
    ends = [*["completed"] * (len(texts) - 1), "completed" if said else status]
    items = [text_item(request.side["response_id"], *named, end) for named, end in zip(texts, ends, strict=False)]
    return items + calls


def text_item(response_id: str, kind: str, text: str, status: str, number: int = 1) -> Json:
    """A message or a reasoning item. `number` counts those of its kind: more than one where a model goes back."""
    suffix = response_id.removeprefix("resp_") + (f"_{number}" if number > 1 else "")
    part = {"type": TEXTS[kind], "text": text}
    if kind == "reasoning":
        sealed = {"summary": [], "encrypted_content": seal(response_id, text)}
        return {"type": kind, "id": f"rs_{suffix}", "status": status, "content": [part], **sealed}
    content = [{**part, "annotations": [], "logprobs": []}]
    return {"type": kind, "id": f"msg_{suffix}", "status": status, "content": content, "role": "assistant"}


def call_item(side: Mapping[str, Any], number: int, said: SaidCall) -> Json:
    """A finished call by the name that the harness knows."""
    tool, suffix = tool_of(side["tools"], said.name), f"{side['response_id'].removeprefix('resp_')}_{number}"
    named = {"call_id": said.call_id, "name": tool.name}
    if tool.namespace:
        named["namespace"] = tool.namespace
    if tool.kind == "custom":
        return {"type": "custom_tool_call", "id": f"ctc_{suffix}", **named, "input": freeform_input(said.arguments)}
    ended = {"arguments": said.arguments, "status": "completed"}
    return {"type": "function_call", "id": f"fc_{suffix}", **named, **ended}


def _usage(answer: Answer) -> Json:
    told = answer.usage
    sent = _count(told.get("prompt_tokens"), answer.prompt_ids.size)
    sampled = _count(told.get("completion_tokens"), answer.sampled_ids.size)
    cached, thought = _detail(told, "prompt", "cached_tokens"), _detail(told, "completion", "reasoning_tokens")
    return {
        "input_tokens": sent,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": sent + sampled,
    }


def _detail(usage: Json, side: str, name: str) -> int:
    details = usage.get(f"{side}_tokens_details")
    return _count(details.get(name) if isinstance(details, dict) else None, 0)


def _count(value: Any, otherwise: int) -> int:
    return value if type(value) is int and 0 <= value < MOST_TOKENS else otherwise
