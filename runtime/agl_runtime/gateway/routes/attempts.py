"""Claims, leases and attempts: what a controller of agl's own uses beside the rollouts' routes."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from agl_runtime.gateway.auth import agent_key
from agl_runtime.gateway.bodies import StrictRoute
from agl_runtime.gateway.recorder import FAILURE_EVENT
from agl_runtime.gateway.routes.context import Patience, State
from agl_runtime.gateway.state import Gateway
from agl_runtime.schemas import (
    ClaimRequest,
    Event,
    EventCreate,
    Grant,
    LeaseRenewal,
    LeaseState,
    NextAttempt,
    Rollout,
)

LEASE_CHECK_S = 1.0
router = APIRouter(prefix="/api", tags=["attempts"], route_class=StrictRoute)


@router.post("/claims")
async def claim(body: ClaimRequest, request: Request, gateway: State) -> list[Grant]:
    """Waits up to `wait` seconds for the first rollout; a controller that has gone is granted nothing."""
    patience = Patience(body.wait)
    while not await request.is_disconnected():
        seen = gateway.rollouts_moved.count
        taken = await gateway.store.claim(body.controller_id, body.limit, body.lease_s, body.held)
        if taken:
            return list(await asyncio.gather(*(_granted(gateway, rollout, attempt) for rollout, attempt in taken)))
        # A lease runs out by the clock and wakes nobody.
        if not await patience.more(gateway, gateway.rollouts_moved, seen, LEASE_CHECK_S):
            break
    return []


@router.post("/claims/renew")
async def renew(body: LeaseRenewal, gateway: State) -> LeaseState:
    lost = await gateway.store.renew(body.controller_id, body.rollout_ids, body.lease_s)
    return LeaseState(lost=lost, held_total_s=gateway.hold.held_total_s, gateway=gateway.name)


@router.post("/rollouts/{rollout_id}/attempt")
async def next_attempt(rollout_id: str, body: NextAttempt, gateway: State) -> Grant:
    async with gateway.attempts.closed(rollout_id, body.after):
        attempt_id = await gateway.store.next_attempt(rollout_id, body.controller_id, body.after)
    return await _granted(gateway, await gateway.store.get_rollout(rollout_id), attempt_id)


@router.post("/rollouts/{rollout_id}/attempt/{attempt_id}/seal", status_code=204)
async def seal(rollout_id: str, attempt_id: str, gateway: State) -> None:
    """Running calls are put on record first; sealing twice is no error."""
    async with gateway.attempts.closed(rollout_id, attempt_id):
        await gateway.store.seal(rollout_id, attempt_id)


@router.post("/rollouts/{rollout_id}/attempt/{attempt_id}/end")
async def end(rollout_id: str, attempt_id: str, body: EventCreate, gateway: State) -> list[Event]:
    """Seal it and add the event of its agent's end; answers with the model calls of it that could not be served."""
    await seal(rollout_id, attempt_id, gateway)
    await gateway.store.add_event(rollout_id, attempt_id, body.event_type, body.data, body.event_id)
    posted = await gateway.store.events(rollout_id, attempt_id)
    return [event for event in posted if event.event_type == FAILURE_EVENT]


async def _granted(gateway: Gateway, rollout: Rollout, attempt_id: str) -> Grant:
    """The attempts before this one are over, also for calls that still run."""
    await gateway.attempts.close(rollout.rollout_id, but=attempt_id)
    gateway.rollout_changed(rollout)
    key = agent_key(gateway.admin_key, rollout.rollout_id, attempt_id, rollout.mode)
    return Grant(rollout=rollout, attempt_id=attempt_id, agent_key=key)
