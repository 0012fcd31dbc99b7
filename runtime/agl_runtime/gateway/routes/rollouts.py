"""Rollouts: enqueue, list, read, end, delete; the terminal page; the recorded calls."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Response

from agl_runtime import calls
from agl_runtime.gateway.bodies import StrictRoute
from agl_runtime.gateway.routes.context import Count, Patience, Seconds, State
from agl_runtime.schemas import (
    ALLOWED_TRANSITIONS,
    TERMINAL_STATES,
    Event,
    Rollout,
    RolloutCreate,
    RolloutDetail,
    RolloutPatch,
    RolloutState,
    TerminalPage,
)
from agl_runtime.store.base import StoredCall

BINARY = "application/x-msgpack"
router = APIRouter(prefix="/api/rollouts", tags=["rollouts"], route_class=StrictRoute)


@router.post("", status_code=201)
async def enqueue(body: list[RolloutCreate], gateway: State) -> list[Rollout]:
    """An id that exists already returns the stored rollout unchanged."""
    rollouts = await gateway.store.add_rollouts(body)
    for rollout in rollouts:
        gateway.rollout_changed(rollout)
    return rollouts


@router.get("")
async def list_by_state(
    gateway: State, state_in: Annotated[list[RolloutState] | None, Query()] = None, limit: Count = 500
) -> list[Rollout]:
    """In order of creation; of all states unless some are named."""
    return await gateway.store.list_rollouts(state_in or list(RolloutState), max(limit, 0))


@router.get("/terminal")
async def terminal(gateway: State, after: Count = 0, limit: Count = 1000, wait: Seconds = 0.0) -> TerminalPage:
    """Finished rollouts in order of completion; waits up to `wait` seconds for the first after the cursor."""
    patience = Patience(wait)
    while True:
        seen = gateway.rollouts_moved.count
        page = await gateway.store.terminal_page(max(after, 0), max(limit, 1))
        if page.items or not await patience.more(gateway, gateway.rollouts_moved, seen):
            return page


@router.get("/{rollout_id}")
async def detail(rollout_id: str, gateway: State) -> RolloutDetail:
    rollout = await gateway.store.get_rollout(rollout_id)
    return RolloutDetail(rollout=rollout, attempts=await gateway.store.attempts(rollout_id))


@router.patch("/{rollout_id}")
async def patch(rollout_id: str, body: RolloutPatch, gateway: State) -> Rollout:
    """Ending a rollout first puts its running calls on record, then seals its attempts."""
    rollout = await gateway.store.get_rollout(rollout_id)
    if body.status is None or not body.status.model_fields_set:
        return rollout
    target = body.status.state
    is_end = target in TERMINAL_STATES and target in ALLOWED_TRANSITIONS[rollout.status.state]
    async with gateway.attempts.closed(rollout_id) if is_end else nullcontext():
        rollout = await gateway.store.patch_rollout(rollout_id, body.status)
    gateway.rollout_changed(rollout)
    return rollout


@router.delete("/{rollout_id}", status_code=204)
async def delete(rollout_id: str, gateway: State) -> None:
    """With its events and calls; a missing id is no error."""
    async with gateway.attempts.closed(rollout_id):
        await gateway.store.delete_rollout(rollout_id)
    gateway.rollouts_moved.fire()


@router.get("/{rollout_id}/calls", response_class=Response)
async def recorded_calls(rollout_id: str, gateway: State, format: Literal["binary", "json"] = "binary") -> Response:
    """Of the last attempt: in the compact binary form that the trainer reads, or as JSON to look at."""
    if format == "json":
        return _json([_readable(call) for call in await gateway.store.calls(rollout_id)])
    attempt_id, packed, incomplete = await gateway.store.packed_calls(rollout_id)
    reward = last_reward(await gateway.store.events(rollout_id, attempt_id))
    body = calls.encode(rollout_id, attempt_id, packed, reward=reward, incomplete=incomplete)
    return Response(body, media_type=BINARY)


def last_reward(events: list[Event]) -> float | None:
    """The value of the newest reward event; None without one that is a finite number."""
    values = [event.data.get("value") for event in events if event.event_type == "reward"]
    value = values[-1] if values else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _readable(call: StoredCall) -> dict[str, Any]:
    spans = call.packed.spans if call.packed else ()
    return {
        "info": asdict(call.info),
        "created_at": call.created_at,
        "latency_ms": call.latency_ms,
        "retry_count": call.retry_count,
        "usage": call.usage,
        "sampled_tokens": int(call.packed.sampled_ids.size) if call.packed else 0,
        "versions": [{"start": span.start, "end": span.end, "version": str(span.version)} for span in spans],
        "request": call.request,
        "response": call.response,
    }


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
