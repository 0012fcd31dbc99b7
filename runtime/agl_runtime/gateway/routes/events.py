"""Events of an attempt: posted by agents and controllers, read together with the model calls."""

from __future__ import annotations

import logging
from typing import Literal

import orjson
from fastapi import APIRouter, Response
from fastapi.exceptions import HTTPException

from agl_runtime.gateway.auth import Caller, judge_event
from agl_runtime.gateway.bodies import EventRoute
from agl_runtime.gateway.events_view import MODEL_REQUEST, call_events, merged, triplets
from agl_runtime.gateway.routes.context import State, Who
from agl_runtime.gateway.state import Gateway
from agl_runtime.schemas import Event, EventCreate, Rollout

logger = logging.getLogger(__name__)
router = APIRouter(prefix="/api/rollouts", tags=["events"], route_class=EventRoute)


@router.post("/{rollout_id}/attempt/{attempt_id}/events")
async def post(rollout_id: str, attempt_id: str, body: EventCreate, gateway: State, caller: Who) -> Event:
    """The same `event_id` again returns the first event."""
    if caller.role == "agent":
        await _judge_agent(gateway, caller, body.event_type)
    return await gateway.store.add_event(rollout_id, attempt_id, body.event_type, body.data, body.event_id)


async def _judge_agent(gateway: Gateway, caller: Caller, event_type: str) -> None:
    attempt = await gateway.attempts.get(caller.rollout_id, caller.attempt_id)
    if attempt.is_closed:
        raise HTTPException(409, f"Attempt {caller.attempt_id} has ended; its late events are refused.")
    configured = gateway.config.agent.reports_reward
    by_rollout = not configured and _names_own_agent(attempt.rollout)
    denial = judge_event(caller, event_type, may_reward=configured or by_rollout)
    if denial is not None:
        raise HTTPException(denial.status, denial.sentence)
    if event_type == "reward" and by_rollout:
        logger.warning("rollout %s: its agent reports its own reward, as agent_class asks for", caller.rollout_id)


def _names_own_agent(rollout: Rollout) -> bool:
    """Whether it was made for a v1.0 controller, whose agents post their rewards themselves."""
    local, k8s = rollout.config.local, rollout.config.k8s
    return bool((local and local.agent_class) or (k8s and k8s.job_template))


@router.get("/{rollout_id}/events", response_model=list[Event])
async def query(
    rollout_id: str, gateway: State, event_type: str | None = None, format: Literal["triplet"] | None = None
) -> Response:
    """Of the last attempt, in order of time; model calls appear as `model_request` events."""
    posted = await gateway.store.events(rollout_id)
    answered = []
    if event_type in (None, MODEL_REQUEST):
        answered = call_events(await gateway.store.calls(rollout_id))
    events = merged(posted, answered)
    if event_type is not None:
        events = [event for event in events if event.event_type == event_type]
    if format == "triplet":
        events = triplets(events)
    return Response(orjson.dumps([event.model_dump() for event in events]), media_type="application/json")
