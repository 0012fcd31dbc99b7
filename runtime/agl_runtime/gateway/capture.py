"""From what a model server sent to an `Answer`: its tokens, log-probabilities, versions, tool calls and usage.

A streamed answer is first assembled into the form of one that was not streamed, so that both are read by one path. The
places of token ids are vLLM's: `prompt_token_ids` at the top (chat) or in the choice (completions), `token_ids` in the
choice, also of a chunk whose delta is {}. Nothing is guessed: what cannot be read is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from agl_runtime.calls import Ids, LogProbs, VersionSpan
from agl_runtime.errors import UpstreamError
from agl_runtime.gateway.internal import Answer, Json
from agl_runtime.schemas import PolicyVersion

ID_LIMIT = 2**31


def read_answer(response: Any) -> Answer:
    """Read a whole answer of the chat or completions API. Raises UpstreamError when it is not one."""
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices or not all(_is_choice(choice) for choice in choices):
        raise UpstreamError(
            "The model server's answer holds no choices.", "Look at the model server's log.", status=200
        )
    first = choices[0]
    sampled = read_ids(first.get("token_ids"))
    finish = first.get("finish_reason")
    model = response.get("model")
    return Answer(
        response=response,
        prompt_ids=read_ids(response.get("prompt_token_ids") or first.get("prompt_token_ids")),
        sampled_ids=sampled,
        logprobs=read_logprobs(first.get("logprobs")),
        spans=read_spans(first.get("weight_versions"), 0 if sampled is None else sampled.size),
        finish_reason=finish if isinstance(finish, str) and finish != "abort" else None,
        model=model if isinstance(model, str) else None,
        usage=usage if isinstance(usage := response.get("usage"), dict) else {},
        choices=len(choices),
        tool_call_ids=tuple(tool_call_ids(first.get("message") or {})),
    )


def _is_choice(choice: Any) -> bool:
    return isinstance(choice, dict) and (isinstance(choice.get("message"), dict) or isinstance(choice.get("text"), str))


def tool_call_ids(message: Json) -> Iterable[str]:
    """The ids of the tool calls that a message makes."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict) and isinstance(call.get("id"), str) and call["id"]:
            yield call["id"]


def read_ids(value: Any) -> Ids | None:
    """Token ids, or None for anything but a non-empty list of integers in range."""
    if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
        return None
    if min(value) < 0 or max(value) >= ID_LIMIT:
        return None
    return np.array(value, dtype=np.int32)


def read_logprobs(value: Any) -> LogProbs | None:
    """The sampled tokens' log-probabilities in the chat or the completions form; a null becomes NaN."""
    if not isinstance(value, dict):
        return None
    items = value.get("content")
    if isinstance(items, list):
        items = [item.get("logprob") if isinstance(item, dict) else None for item in items]
    else:
        items = value.get("token_logprobs")
    if not isinstance(items, list) or not items:
        return None
    return np.array([x if isinstance(x, int | float) else np.nan for x in items], dtype=np.float64).astype(np.float32)


def read_spans(value: Any, sampled: int) -> tuple[VersionSpan, ...] | None:
    """Version spans in order; empty when they do not cover the sampled tokens without gap or overlap."""
    if value is None:
        return None
    try:
        spans = tuple(VersionSpan(row["start"], row["end"], PolicyVersion.parse(row["version"])) for row in value)
        edges = [0, *(span.end for span in spans)]
        whole = [span.start for span in spans] == edges[:-1] and edges[-1] == sampled and edges == sorted(edges)
    except (TypeError, KeyError, ValueError, AttributeError):
        return ()
    return spans if whole else ()


class StreamAssembler:
    """Puts the chunks of one stream together as a whole answer; `response()` may be read at any time."""

    def __init__(self) -> None:
        self._top: Json = {}
        self._choices: dict[int, Json] = {}

    def feed(self, chunk: Json) -> None:
        """Raises UpstreamError for a chunk that has no list of choices."""
        rows = chunk.get("choices")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UpstreamError(
                "The model server's stream holds no choices.", "Look at the model server's log.", status=200
            )
        for key, value in chunk.items():
            if key != "choices" and value is not None:
                self._top[key] = value
        for row in rows:
            index = row.get("index")
            _merge_choice(self._choices.setdefault(index if isinstance(index, int) else 0, {}), row)

    def response(self) -> Json:
        kind = str(self._top.get("object", "")).removesuffix(".chunk")
        choices = [{"index": i, **_finished(self._choices[i])} for i in sorted(self._choices)]
        return {**self._top, "object": kind, "choices": choices}


def is_terminal(chunk: Json) -> bool:
    """Whether a harness may act on this chunk: it finishes a choice or follows one that did."""
    rows = chunk["choices"]
    return not rows or any(row.get("finish_reason") is not None for row in rows)


def _merge_choice(choice: Json, row: Json) -> None:
    for key, value in row.items():
        if key == "delta" and isinstance(value, dict):
            _merge_delta(choice.setdefault("message", {"role": "assistant", "content": None}), value)
        elif key == "logprobs" and isinstance(value, dict):
            _merge_lists(choice.setdefault("logprobs", {}), value)
        elif key == "token_ids" and isinstance(value, list):
            choice.setdefault("token_ids", []).extend(value)
        elif key == "text" and isinstance(value, str):
            choice["text"] = choice.get("text", "") + value
        elif key not in ("delta", "index") and value is not None:
            choice[key] = value


def _merge_delta(message: Json, delta: Json) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            for call in value if isinstance(value, list) else []:
                _merge_tool_call(message, call)
        elif isinstance(value, str) and key != "role":
            message[key] = (message.get(key) or "") + value
        elif value is not None:
            message[key] = value


def _merge_tool_call(message: Json, call: Any) -> None:
    if not isinstance(call, dict):
        return
    calls: list[Json] = message.setdefault("tool_calls", [])
    index = call.get("index", len(calls) - 1)
    known = next((item for item in calls if item["index"] == index), None)
    if known is None:
        known = {"index": index, "id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        calls.append(known)
    function = call.get("function")
    for key in ("name", "arguments"):
        if isinstance(function, dict) and isinstance(function.get(key), str):
            known["function"][key] += function[key]
    known.update({key: value for key, value in call.items() if key not in ("function", "index") and value is not None})


def _merge_lists(into: Json, value: Mapping[str, Any]) -> None:
    for key, items in value.items():
        if isinstance(items, list):
            into.setdefault(key, []).extend(items)


def _finished(choice: Json) -> Json:
    """The choice without what only a stream needs: the indexes of its tool calls."""
    message = choice.get("message")
    if not message or "tool_calls" not in message:
        return choice
    calls = [{key: value for key, value in call.items() if key != "index"} for call in message["tool_calls"]]
    return {**choice, "message": {**message, "tool_calls": calls}}
