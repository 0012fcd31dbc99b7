"""Model calls as Agent Lightning v1.0's `model_request` events, whole or as triplets. Pure.

Token ids and log-probabilities come from the record's arrays, into the places where a model server would put them. A
call that was never committed is no event; `GET /api/rollouts/{id}/calls` names those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from agl_runtime.calls import Call, unpack
from agl_runtime.gateway.capture import read_logprobs
from agl_runtime.gateway.internal import Json
from agl_runtime.schemas import Event
from agl_runtime.store.base import StoredCall

MODEL_REQUEST = "model_request"


def call_events(stored: Sequence[StoredCall]) -> list[Event]:
    """One event for each committed call, at the time of its answer and in the order of answers: none is dated before
    the one that it follows, as a call's beginning, dated when it was written, can make it seem."""
    packed = sorted(((call.packed, call) for call in stored if call.packed), key=lambda pair: pair[0].info.commit_seq)
    events: list[Event] = []
    answered_at = 0.0
    for whole, (_, call) in zip(unpack([each for each, _ in packed]), packed, strict=True):
        answered_at = max(answered_at, call.created_at + (call.latency_ms or 0.0) / 1000)
        events.append(_event(call, whole, answered_at))
    return events


def merged(*lists: Iterable[Event]) -> list[Event]:
    return sorted((event for events in lists for event in events), key=lambda event: event.timestamp)


def triplets(events: Sequence[Event]) -> list[Event]:
    """What training needs of each event; of calls with the same non-empty prompt only the last."""
    trimmed = [_trimmed(event) for event in events]
    prompts = [_prompt_of(event) for event in trimmed]
    last = {prompt: i for i, prompt in enumerate(prompts)}
    return [event for i, event in enumerate(trimmed) if not prompts[i] or last[prompts[i]] == i]


def _prompt_of(event: Event) -> tuple[int, ...]:
    """Its prompt's ids; empty for other events and where they are no ids."""
    ids = event.data.get("prompt_token_ids") if event.event_type == MODEL_REQUEST else None
    return tuple(ids) if isinstance(ids, list) and all(type(item) is int for item in ids) else ()


def _event(stored: StoredCall, call: Call, answered_at: float) -> Event:
    info, upstream = stored.info, stored.upstream
    shown = {"model", "endpoint", "version"}
    server: Json = upstream.model_dump(include=shown) if upstream else dict.fromkeys(shown)
    if call.spans:
        server["version"] = min(span.version for span in call.spans).updates
    data = {
        "model": server["model"],
        "model_version": server["version"],
        "request": stored.request,
        "response": _with_tokens(stored.response or {}, call),
        "server": server,
        "latency_ms": stored.latency_ms,
        "http_status": info.http_status,
        "status": "ok" if (info.http_status or 500) < 400 else "error",
        "retry_count": stored.retry_count,
        "usage": stored.usage or None,
        "finish_reason": info.finish_reason,
        "call_id": info.call_id,
        "dialect": info.dialect,
        "trainable": info.trainable,
        "reason": info.reason,
    }
    return Event(
        event_type=MODEL_REQUEST,
        rollout_id=info.rollout_id,
        attempt_id=info.attempt_id,
        timestamp=answered_at,
        data=data,
    )


def _with_tokens(response: Json, call: Call) -> Json:
    choices = response.get("choices")
    if not choices:
        return response
    first = {**choices[0], "token_ids": call.sampled_ids.tolist()}
    logprobs: list[float] = call.logprobs.tolist()
    if not first.get("logprobs") and logprobs:
        in_chat = {"content": [{"logprob": value} for value in logprobs]}
        first["logprobs"] = in_chat if "message" in first else {"token_logprobs": logprobs}
    return {**response, "prompt_token_ids": call.prompt_ids.tolist(), "choices": [first, *choices[1:]]}


def _trimmed(event: Event) -> Event:
    data = event.data
    if event.event_type == "reward":
        kept: Json = {"value": data.get("value")}
        kept |= {key: data[key] for key in ("source", "reason") if key in data}
        return event.model_copy(update={"data": kept})
    if event.event_type != MODEL_REQUEST:
        return event
    response, server = _mapping(data.get("response")), _mapping(data.get("server"))
    choices = response.get("choices")
    choice = _mapping(choices[0]) if isinstance(choices, list) and choices else {}
    logprobs = read_logprobs(choice.get("logprobs"))
    trimmed: Json = {
        "prompt_token_ids": response.get("prompt_token_ids") or choice.get("prompt_token_ids") or [],
        "response_token_ids": choice.get("token_ids") or [],
        "response_log_probs": logprobs.tolist() if logprobs.size and np.isfinite(logprobs).all() else None,
        "server": {"model": server.get("model"), "version": server.get("version")},
    }
    trimmed |= {key: data[key] for key in ("http_status", "status") if key in data}
    if "error" in response:
        trimmed["error"] = response["error"]
    return event.model_copy(update={"data": trimmed})


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}
