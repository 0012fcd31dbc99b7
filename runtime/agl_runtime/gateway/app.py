"""The gateway's HTTP application: its state, its door, its routes, and how errors are told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from agl_runtime.config import Config
from agl_runtime.errors import AglError, ConflictError, KeyRefusedError, NotFoundError, StoreError
from agl_runtime.gateway import state
from agl_runtime.gateway.access import PROXY_PREFIX, KeyGate, dialect_of
from agl_runtime.gateway.document import REFUSALS, with_model_calls
from agl_runtime.gateway.internal import CallRefused, Json
from agl_runtime.gateway.routes import anthropic, attempts, events, models, proxy, rollouts, upkeep
from agl_runtime.store.base import Store

ROUTERS = (
    anthropic.router,
    proxy.router,
    rollouts.router,
    attempts.router,
    events.router,
    models.router,
    upkeep.router,
)


class _App(FastAPI):
    """The door, and behind it the way of model calls, stand before FastAPI, which would cost as much as a model call
    does."""

    def stand_behind(self, gateway: state.Gateway) -> None:
        self.state.gateway = gateway
        self._door = KeyGate(proxy.ModelCalls(super().__call__, gateway), gateway.admin_key, gateway.dialects)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._door(scope, receive, send)

    def openapi(self) -> Json:
        return with_model_calls(super().openapi(), self.state.gateway.dialects)


def create_app(config: Config, store: Store, admin_key: str) -> FastAPI:
    """The store must be open, and stays open after the app ends. `app.state.gateway` is everything that it holds.
    Raises ConfigError without an admin key."""
    gateway = state.build(config, store, admin_key)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        gateway.start()
        try:
            yield
        finally:
            gateway.stop()
            await gateway.close()

    app = _App(title="agl gateway", version="1.0.0", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.stand_behind(gateway)
    app.add_exception_handler(AglError, _tell)
    app.add_exception_handler(CallRefused, _refuse)
    app.add_exception_handler(404, _unserved)
    app.add_exception_handler(405, _unserved)
    for router in ROUTERS:
        app.include_router(router, responses=REFUSALS)
    return app


async def _refuse(request: Request, refused: Exception) -> JSONResponse:
    if not isinstance(refused, CallRefused):
        raise refused
    dialects = cast(state.Gateway, request.app.state.gateway).dialects
    body = dialect_of(dialects, request.scope["path"]).error(refused)
    return JSONResponse(body, refused.http_status, refused.headers())


async def _unserved(request: Request, error: Exception) -> Response:
    """What no route serves, told below a rollout's address as its dialects tell errors."""
    if not isinstance(error, HTTPException):
        raise error
    path = str(request.scope["path"])
    if not path.startswith(PROXY_PREFIX):
        return await http_exception_handler(request, error)
    what = f"The gateway does not serve {request.method} {path.split('/', 8)[-1]}."
    return await _refuse(request, CallRefused(what, http_status=error.status_code))


async def _tell(_: Request, error: Exception) -> JSONResponse:
    # A full disk or a locked file passes: agl's own parts call again for a while.
    known = {NotFoundError: 404, ConflictError: 409, KeyRefusedError: 403, StoreError: 503}
    status = next((code for kind, code in known.items() if isinstance(error, kind)), 500)
    return JSONResponse({"detail": str(error)}, status)
