"""Why a prompt that should have continued a trace did not: the cause, read at the first token that differs.

    retokenized  the same text in other ids
    trimmed      the same text but for white space
    truncated    the history was cut: the prompt goes on with a later part of the trace, or ends inside it
    template     the history reads differently: an answer was changed, or lost its reasoning, or what stands before an
                 answer that the prompt still holds was changed. By the chat template, or by the agent: ids do not tell
    omitted      the prompt goes on from the earlier one but without its answer: some harnesses forget what they could
                 not use
    other        none of these: a sub-agent, a branch, a compaction, another conversation

This only explains; no id is ever changed by what is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agl_runtime.calls import Call, Ids, common_prefix
from agl_runtime.samples.types import Break

Decode = Callable[[Sequence[int]], str]

_BEFORE = 8
"""Common tokens decoded with the difference, so that characters split over tokens come out whole."""
_AFTER = 32
"""Tokens compared as text from the first difference on."""
_SHOWN = 16
"""Tokens told from the first difference on."""
_RESUME = 8
"""Ids that must be equal to find a part of the trace again."""


def diagnose(call: Call, line: Sequence[Call], decode: Decode) -> Break:
    """Where and why `call` does not continue `line`, the calls along one earlier trace, root first."""
    prompt, trace = call.prompt_ids, np.concatenate([line[-1].prompt_ids, line[-1].sampled_ids])
    at = common_prefix(prompt, trace)
    before, was, now = (
        decode(ids.tolist())
        for ids in (prompt[max(0, at - _BEFORE) : at], trace[at : at + _SHOWN], prompt[at : at + _SHOWN])
    )
    return Break(_cause(prompt, trace, line, decode), call.info.call_id, line[-1].info.call_id, before, was, now)


def _cause(prompt: Ids, trace: Ids, line: Sequence[Call], decode: Decode) -> str:
    at = common_prefix(prompt, trace)
    ours, theirs = prompt[at:], trace[at:]
    if not at or not theirs.size:
        return "other"
    if not ours.size:
        return "truncated"
    since = max(0, at - _BEFORE)
    same = _compare(decode(prompt[since : at + _AFTER].tolist()), decode(trace[since : at + _AFTER].tolist()))
    if same is not None:
        return same
    sampled = [(c.prompt_ids.size, c.prompt_ids.size + c.sampled_ids.size) for c in line]
    dropped = _find(theirs, ours[:_RESUME])
    if dropped is not None:
        return "template" if any(start <= at and at + dropped <= end for start, end in sampled) else "truncated"
    if any(start <= at < end for start, end in sampled) or _find(ours, theirs[-_RESUME:]) is not None:
        return "template"
    # Both prompts end with the same words, which begin an answer.
    last = line[-1].prompt_ids
    beginning = common_prefix(prompt[::-1], last[::-1])
    return "omitted" if at + beginning >= last.size else "other"


def shared_prefix(prompt: Ids, call: Call) -> int:
    """Leading ids that `prompt` has in common with the trace of `call`."""
    shared = common_prefix(prompt, call.prompt_ids)
    if shared < call.prompt_ids.size:
        return shared
    return shared + common_prefix(prompt[shared:], call.sampled_ids)


def _compare(a: str, b: str) -> str | None:
    """Compares as far as both windows reach; a character cut at a window's end decodes to U+FFFD and is left out."""
    a, b = a.rstrip("\ufffd"), b.rstrip("\ufffd")
    if a.startswith(b) or b.startswith(a):
        return "retokenized"
    a, b = "".join(a.split()), "".join(b.split())
    return "trimmed" if a.startswith(b) or b.startswith(a) else None


def _find(where: Ids, what: Ids) -> int | None:
    """Position of the first occurrence of `what` in `where`."""
    if what.size > where.size:
        return None
    hits = np.lib.stride_tricks.sliding_window_view(where, what.size) == what
    positions = np.flatnonzero(hits.all(axis=1))
    return int(positions[0]) if positions.size else None
