"""What runs and how it goes: parts, counts, checkpoints, the change stream, metrics, health."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from agl_runtime.gateway import metrics
from agl_runtime.gateway.bodies import StrictRoute
from agl_runtime.gateway.routes.context import Count, State
from agl_runtime.gateway.state import Gateway
from agl_runtime.schemas import CheckpointRecord, PartStatus

SIGN_OF_LIFE_S = 15.0
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
router = APIRouter(tags=["upkeep"], route_class=StrictRoute)


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/metrics", response_class=Response)
async def prometheus(gateway: State) -> Response:
    counts = await gateway.counts()
    text = metrics.render(gateway.metrics, gateway.hold.state(), gateway.hold.held_total_s, counts)
    return Response(text, media_type=METRICS_TYPE)


@router.get("/api/counts")
async def counts(gateway: State) -> dict[str, int]:
    """Rollouts by state and calls by reason."""
    return await gateway.counts()


@router.post("/api/parts")
async def report(body: PartStatus, gateway: State) -> PartStatus:
    status = body.model_copy(update={"updated_at": time.time()})
    gateway.parts[status.part] = status
    gateway.changes.emit("part", status.model_dump())
    return status


@router.get("/api/parts")
async def parts(gateway: State) -> list[PartStatus]:
    """The last status of each part, and the gateway's own."""
    return [_own_status(gateway), *gateway.parts.values()]


def _own_status(gateway: Gateway) -> PartStatus:
    proxy = gateway.hold.state()
    has_model = bool(gateway.registry.models())
    return PartStatus(
        part="gateway",
        pid=os.getpid(),
        state="holding" if proxy.paused else "running",
        waiting_for=None if has_model else "a model server",
        detail={"inflight": proxy.inflight, "held": proxy.held, "held_total_s": round(gateway.hold.held_total_s, 1)},
        updated_at=time.time(),
    )


@router.post("/api/checkpoints", status_code=201)
async def record_checkpoint(body: CheckpointRecord, gateway: State) -> CheckpointRecord:
    await gateway.store.record_checkpoint(body)
    gateway.changes.emit("checkpoint", body.model_dump(exclude={"rollout_ids"}))
    return body


@router.get("/api/checkpoints")
async def checkpoints(gateway: State, run_id: str | None = None) -> list[CheckpointRecord]:
    return await gateway.store.checkpoints(run_id)


@router.get("/api/changes", response_class=StreamingResponse)
async def changes(gateway: State, after: Count = 0) -> StreamingResponse:
    """Server-sent events, one `Change` each, from the first after `after` that is still kept."""
    return StreamingResponse(_lines(gateway, after), media_type="text/event-stream")


async def _lines(gateway: Gateway, after: int) -> AsyncIterator[str]:
    after = gateway.changes.start_after(after)
    while not gateway.is_stopping:
        seen = gateway.changes.moved.count
        for change in gateway.changes.since(after):
            after = change.seq
            yield f"id: {change.seq}\ndata: {change.model_dump_json()}\n\n"
        if not await gateway.changes.moved.wait(seen, SIGN_OF_LIFE_S):
            yield ": still here\n\n"
