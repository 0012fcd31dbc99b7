"""Model servers, and holding calls while their weights change."""

from __future__ import annotations

from fastapi import APIRouter

from agl_runtime.gateway.bodies import StrictRoute
from agl_runtime.gateway.routes.context import LONGEST_WAIT_S, Seconds, State
from agl_runtime.schemas import Model, PauseRequest, ProxyState

router = APIRouter(tags=["models"], route_class=StrictRoute)


@router.post("/api/models", status_code=201)
async def register(body: list[Model], gateway: State) -> list[Model]:
    """Add, or replace by (model, endpoint)."""
    gateway.set_models(body)
    return body


@router.get("/api/models")
async def registered(gateway: State) -> list[Model]:
    return gateway.registry.models()


@router.delete("/api/models")
async def clear(gateway: State) -> dict[str, str]:
    gateway.set_models(None)
    return {"status": "ok"}


@router.post("/proxy/pause")
async def pause(body: PauseRequest, gateway: State) -> ProxyState:
    """Hold new calls; those at a model server go on."""
    gateway.hold.pause(body)
    gateway.proxy_changed()
    return gateway.hold.state()


@router.post("/proxy/resume")
async def resume(gateway: State) -> ProxyState:
    gateway.hold.resume()
    gateway.proxy_changed()
    return gateway.hold.state()


@router.get("/proxy/state")
async def state(gateway: State, drained_wait: Seconds = 0.0) -> ProxyState:
    """Waits up to `drained_wait` seconds for nothing to be in flight."""
    return await gateway.hold.drained(min(drained_wait, LONGEST_WAIT_S))
