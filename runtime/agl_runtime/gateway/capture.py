"""From what a model server sent to an `Answer`: its tokens, log-probabilities, versions, tool calls and usage.

A streamed answer is first assembled into the form of one that was not streamed, so that both are read by one path. The
places of token ids are vLLM's: `prompt_token_ids` at the top (chat) or in the choice (completions), `token_ids` in the
choice, also of a chunk whose delta is {}, and `routed_experts` there too, never in a stream. Nothing is guessed: what
cannot be read is None.
"""

from __future__ import annotations

import binascii
import re
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from agl_runtime.calls import Experts, Ids, LogProbs, VersionSpan
from agl_runtime.gateway.internal import Answer, Json, ServerFailed
from agl_runtime.schemas import PolicyVersion

ID_LIMIT = 2**31  # of token ids, and of the numbers in a version
NO_IDS: Ids = np.empty(0, np.int32)
# Texts that a stream says once, or again in every chunk; all others come in pieces.
_SAID_WHOLE = frozenset({"role", "id", "type"})
_GROWING = frozenset({"text", "token_ids", "logprobs"})  # of what stands in a choice
# numpy's own reader evaluates the head of a file as Python, and whoever wrote it can have that raise anything.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([|<>][iu][1248])', 'fortran_order': False, "
    rb"'shape': \((\d{1,9}), (\d{1,4}), (\d{1,4})\), \} *\n",
    re.DOTALL,
)


def read_answer(response: Any, call_id: str | None = None) -> Answer:
    """Read a whole answer of the chat or completions API. Raises ServerFailed when it is not one. Tool calls without an
    id get one within it, made from `call_id`."""
    choices = response.get("choices") if isinstance(response, dict) else None
    if not isinstance(choices, list) or not choices or not all(_is_choice(choice) for choice in choices):
        raise ServerFailed("The model server's answer holds no choices.", status=200)
    for place, choice in enumerate(choices if call_id else ()):
        _mint_ids((choice.get("message") or {}).get("tool_calls"), f"call_{call_id}_{place}", set())
    return read_partial(response)


def read_partial(response: Json) -> Answer:
    """Read what there is of an answer, which may have no choices yet."""
    first = response["choices"][0] if response["choices"] else {}
    sampled = read_ids(first.get("token_ids"))
    prompt = read_ids(response.get("prompt_token_ids") or first.get("prompt_token_ids"))
    finish, model, usage = first.get("finish_reason"), response.get("model"), response.get("usage")
    return Answer(
        response=response,
        prompt_ids=prompt,
        sampled_ids=sampled,
        logprobs=read_logprobs(first.get("logprobs")),
        spans=read_spans(first.get("weight_versions"), sampled.size),
        finish_reason=finish if isinstance(finish, str) and finish != "abort" else None,
        model=model if isinstance(model, str) else None,
        usage=usage if isinstance(usage, dict) else {},
        tool_calls=dict(_tool_calls(first.get("message") or {})),
        routed=read_experts(first.get("routed_experts"), prompt.size + sampled.size - 1),
    )


def forget_tokens(response: Json) -> None:
    """Let go of what was read of a whole answer: thousands of objects, which are freed fast only at once, while the
    processor still has them at hand."""
    for row in (response, *response["choices"]):
        for key in ("prompt_token_ids", "token_ids", "logprobs", "routed_experts"):
            row.pop(key, None)


def _is_choice(choice: Any) -> bool:
    return _is_row(choice) and (choice.get("message") is not None or isinstance(choice.get("text"), str))


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and ((message := row.get("message")) is None or isinstance(message, dict))


def _tool_calls(message: Json) -> Iterable[tuple[str, str]]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        if isinstance(call, dict) and isinstance(call.get("id"), str) and call["id"]:
            function = call.get("function")
            arguments = function.get("arguments") if isinstance(function, dict) else None
            yield call["id"], arguments if isinstance(arguments, str) else ""


def _mint_ids(calls: Any, prefix: str, known: set[str]) -> None:
    """Name the tool calls of a message, or of a part of one, that begin in it without an id."""
    for place, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, dict):
            name = f"{prefix}_{call.get('index', place)}"
            if name not in known and not call.get("id"):
                call["id"] = name
            known.add(name)


def read_ids(value: Any) -> Ids:
    """Token ids; empty for anything but a list of integers in range."""
    if not isinstance(value, list) or not value:
        return NO_IDS
    try:
        ids = np.frombuffer(struct.pack(f"{len(value)}i", *value), np.int32)  # a quarter of the time of np.array
    except struct.error:
        return NO_IDS
    small = [value[place] for place in np.flatnonzero(ids < 2)]  # true and false pass for 1 and 0
    return NO_IDS if any([type(number) is not int or number < 0 for number in small]) else ids


def read_logprobs(value: Any) -> LogProbs:
    """The sampled tokens' log-probabilities in the chat or the completions form; a null becomes NaN."""
    value = value if isinstance(value, dict) else {}
    items = value.get("content")
    if not isinstance(items, list):
        items = value.get("token_logprobs")
        items = items if isinstance(items, list) else []
    elif type(items) is not Numbers:
        items = _logprobs(items)
    try:
        return np.frombuffer(struct.pack(f"{len(items)}f", *items), np.float32)
    except (struct.error, OverflowError):
        with np.errstate(over="ignore"):  # what is beyond a float32 becomes infinite
            return np.array([_number(item) for item in items], np.float64).astype(np.float32)


def _logprobs(items: list[Any]) -> list[Any]:
    try:
        return [item["logprob"] for item in items]
    except (TypeError, KeyError):
        return [item.get("logprob") if isinstance(item, dict) else None for item in items]


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else np.nan
    except OverflowError:
        return np.nan


def read_experts(value: Any, tokens: int) -> Experts | None:
    """[tokens, layers, k] from the base64 of a .npy file, as numpy writes it. None for anything else."""
    try:
        file = binascii.a2b_base64(value)
        head = _NPY.match(file)
        if head is None:
            return None
        flat, shape = (
            np.frombuffer(file, head[1].decode(), offset=head.end()),
            [int(size) for size in head.groups()[1:]],
        )
        experts, most = flat.reshape(shape), int(flat.max())
    except (ValueError, TypeError):
        return None
    if len(experts) != tokens or experts.min() < 0 or most >= 2**15:
        return None
    return experts.astype(np.uint8 if most < 2**8 else np.int16, copy=False)


def read_spans(value: Any, sampled: int) -> tuple[VersionSpan, ...] | None:
    """Version spans in order; empty when they do not cover the sampled tokens without gap or overlap."""
    if value is None:
        return None
    try:
        spans = tuple(VersionSpan(row["start"], row["end"], PolicyVersion.parse(row["version"])) for row in value)
        if not all(_is_count(number) for span in spans for number in (span.start, span.end, *span.version)):
            return ()
        edges = [0, *(span.end for span in spans)]
        whole = [span.start for span in spans] == edges[:-1] and edges[-1] == sampled and edges == sorted(edges)
    except (TypeError, KeyError, ValueError, AttributeError):
        return ()
    return spans if whole else ()


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number < ID_LIMIT


class Numbers(list[Any]):
    """The log-probabilities out of the chat form's items, in its place."""


class _Text(list[str]):
    """A text in the pieces in which it came: to add each to a long text would copy that again and again."""


def _told(value: Any) -> Any:
    """A copy in which every text is whole."""
    if type(value) is _Text:
        return "".join(value)
    if isinstance(value, dict):
        return {key: _told(item) for key, item in value.items()}
    return [_told(item) for item in value] if isinstance(value, list) else value


class StreamAssembler:
    """Puts the chunks of one stream together as a whole answer; `response()` may be read at any time. Tool calls
    without an id get one, in the chunks too, that is made from `call_id`. Without `keeps_logprobs` the chat form of
    log-probabilities becomes `Numbers`: all else that is told of each token would be kept for nobody."""

    def __init__(self, call_id: str | None = None, *, keeps_logprobs: bool = True) -> None:
        self._call_id = call_id
        self._keeps_logprobs = keeps_logprobs
        self._named: set[str] = set()
        self._top: Json = {}
        self._choices: dict[int, Json] = {}

    def feed(self, chunk: Json) -> None:
        """Raises ServerFailed for a chunk that has no list of choices."""
        rows = chunk.get("choices")
        if not isinstance(rows, list):
            raise _no_choices()
        top = self._top
        for key, value in chunk.items():
            if value is not None and key != "choices":
                top[key] = value
        for row in rows:
            if not _is_row(row):
                raise _no_choices()
            index, delta = row.get("index"), row.get("delta")
            index = index if isinstance(index, int) else 0
            if isinstance(delta, dict) and "tool_calls" in delta and self._call_id:
                _mint_ids(delta["tool_calls"], f"call_{self._call_id}_{index}", self._named)
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = {}
            _merge_choice(choice, row, self._keeps_logprobs)

    def response(self) -> Json:
        kind = str(self._top.get("object", "")).removesuffix(".chunk")
        choices = [{"index": i, **_finished(self._choices[i])} for i in sorted(self._choices)]
        return {**self._top, "object": kind, "choices": choices}


def _no_choices() -> ServerFailed:
    return ServerFailed("The model server's stream holds no choices.", status=200)


def is_terminal(chunk: Json) -> bool:
    """Whether a harness may act on this chunk: it finishes a choice or follows one that did."""
    rows = chunk["choices"]
    for row in rows:
        if row.get("finish_reason") is not None:
            return True
    return not rows


def _merge_choice(choice: Json, row: Json, keeps_logprobs: bool) -> None:
    for key, value in row.items():
        if value is None or key == "index":
            continue
        if key == "logprobs" and isinstance(value, dict):
            _extend(choice, value, keeps_logprobs)
        elif key in _GROWING:
            _grow(choice, key, value)
        elif key != "delta":
            choice[key] = value
        elif isinstance(value, dict):
            message = choice.get("message")
            if message is None:
                message = choice["message"] = {"role": "assistant", "content": None}
            for name, part in value.items():
                _grow(message, name, part)


def _extend(choice: Json, logprobs: Json, keeps_logprobs: bool) -> None:
    """Add what is told of tokens: lists of items, one for each token, which are kept as they are."""
    known = choice.get("logprobs")
    if not isinstance(known, dict):
        known = choice["logprobs"] = {}
    for name, part in logprobs.items():
        items = known.get(name)
        if name == "content" and not keeps_logprobs and isinstance(part, list):
            part = Numbers(_logprobs(part))
        if not isinstance(part, list):
            _grow(known, name, part)
        elif isinstance(items, list) and type(items) is not _Text:
            items += part
        else:
            known[name] = part if type(part) is Numbers else part.copy()


def _grow(into: Json, key: str, value: Any) -> None:
    """Add one piece: texts grow, lists grow (items with an `index` each by themselves), anything else is replaced."""
    known = into.get(key)
    if isinstance(value, str):
        if key in _SAID_WHOLE:
            into[key] = value or known
        elif type(known) is _Text:
            known.append(value)
        else:
            into[key] = _Text([value])
    elif isinstance(value, list):
        if type(known) is not list:
            known = into[key] = []
        if key == "token_ids":
            known += value
        else:
            for item in value:
                _add_item(known, item)
    elif isinstance(value, dict):
        if not isinstance(known, dict):
            known = into[key] = {}
        for name, part in value.items():
            _grow(known, name, part)
    elif value is not None:
        into[key] = value


def _add_item(items: list[Any], item: Any) -> None:
    index = item.get("index") if isinstance(item, dict) else None
    if index is None:
        items.append(item)
        return
    known = next((x for x in items if isinstance(x, dict) and x.get("index") == index), None)
    if known is None:
        known = {}
        items.append(known)
    for name, part in item.items():
        _grow(known, name, part)


def _finished(choice: Json) -> Json:
    """The choice as one that was not streamed has it: every text whole, tool calls without their indexes."""
    told = {key: value if key in ("token_ids", "logprobs") else _told(value) for key, value in choice.items()}
    if isinstance(told.get("logprobs"), dict):
        parts = told["logprobs"].items()
        told["logprobs"] = {name: part if type(part) in (list, Numbers) else _told(part) for name, part in parts}
    calls = told.get("message", {}).get("tool_calls")
    if isinstance(calls, list):
        told["message"]["tool_calls"] = [_without_index(call) for call in calls if isinstance(call, dict)]
    return told


def _without_index(call: Json) -> Json:
    return {key: value for key, value in call.items() if key != "index"}
