"""Where agents call their model: one base URL for each rollout, attempt and mode."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast, get_args

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_runtime.gateway import bodies
from agl_runtime.gateway.access import dialect_of
from agl_runtime.gateway.dialects import messages
from agl_runtime.gateway.dialects.openai import error_body
from agl_runtime.gateway.internal import CallRefused
from agl_runtime.gateway.routes.context import NotRevoked, State
from agl_runtime.gateway.state import Gateway
from agl_runtime.schemas import Mode

_CALL = re.compile(r"/proxy/rollout/([^/]+)/attempt/([^/]+)/mode/([^/]+)/(.+)")
_ROUTED = frozenset({f"{messages.PATH}/count_tokens"})  # POSTs that call no model
BASE = "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}"
router = APIRouter(tags=["proxy"], dependencies=[NotRevoked])


@router.get(BASE + "/openai/v1/models")
async def models(rollout_id: str, attempt_id: str, mode: str, gateway: State) -> dict[str, object]:
    """The names that the policy answers to, as OpenAI's list."""
    rows = [{"id": name, "object": "model", "created": 0, "owned_by": "agl"} for name in gateway.registry.names()]
    return {"object": "list", "data": rows}


@router.get(BASE + "/openai/v1/responses", include_in_schema=False)
async def no_websocket() -> JSONResponse:
    """Codex asks for a WebSocket first, and goes on without one only where it gets 426."""
    refused = CallRefused("Responses are told over HTTP, not over a WebSocket: POST the request.", http_status=426)
    return JSONResponse(error_body(refused), refused.http_status, {"upgrade": "HTTP/1.1"})


@dataclass
class ModelCalls:
    """ASGI middleware that serves model calls, forwarded and recorded, streamed where the body asks for it."""

    app: ASGIApp
    gateway: Gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        path = _CALL.fullmatch(scope["path"]) if is_post else None
        if path is None or path[4] in _ROUTED:
            await self.app(scope, receive, send)
            return
        with ExitStack() as carried:
            try:
                response = await self._answer(path, Request(scope, receive), carried)
            except CallRefused as refused:
                self.gateway.metrics.refused[refused.http_status] += 1
                body = dialect_of(self.gateway.dialects, scope["path"]).error(refused)
                response = JSONResponse(body, refused.http_status, refused.headers())
            await response(scope, receive, send)

    async def _answer(self, path: re.Match[str], request: Request, carried: ExitStack) -> Response:
        """Enters into `carried` what must last until the answer is out."""
        gateway = self.gateway
        rollout_id, attempt_id, mode, operation = path.groups()
        dialect = gateway.dialects.get(operation)
        if dialect is None:
            what = f"The gateway does not serve {operation}."
            raise CallRefused(what, f"It serves {', '.join(sorted(gateway.dialects))}.", http_status=404)
        try:
            carried.enter_context(gateway.load.carry(request.headers.get("content-length")))
        except CallRefused as refused:
            await gateway.calls.note_shed(rollout_id, attempt_id, refused)
            raise
        raw = await raw_body(request)
        return await gateway.calls.open(rollout_id, attempt_id, _mode(mode), dialect, raw, request.headers)


async def raw_body(request: Request) -> bytes:
    """Raises CallRefused for one that is too large, or whose client left before it was whole."""
    try:
        return await bodies.read(request, bodies.MODEL_CALL_BYTES)
    except ClientDisconnect as error:
        raise CallRefused("The client left before its request was whole.", http_status=499) from error
    except bodies.TooLarge as error:
        raise CallRefused(str(error), "Send a shorter conversation.", http_status=413) from error


def _mode(text: str) -> Mode:
    if text not in get_args(Mode):
        raise CallRefused(f"There is no mode {text}.", "Use train or val.", http_status=404)
    return cast(Mode, text)
