"""Where agents call their model: one base URL for each rollout, attempt and mode."""

from __future__ import annotations

from typing import cast, get_args

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from agl_runtime.gateway.access import dialect_of
from agl_runtime.gateway.internal import CallRefused
from agl_runtime.gateway.routes.context import State
from agl_runtime.gateway.service import CallPath
from agl_runtime.schemas import Mode

BASE = "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}"
router = APIRouter(tags=["proxy"])


@router.get(BASE + "/openai/v1/models")
async def models(rollout_id: str, attempt_id: str, mode: str, gateway: State) -> dict[str, object]:
    """The names that the policy answers to, as OpenAI's list."""
    rows = [{"id": name, "object": "model", "created": 0, "owned_by": "agl"} for name in gateway.registry.names()]
    return {"object": "list", "data": rows}


@router.post(BASE + "/{operation:path}", response_class=Response)
async def call(
    rollout_id: str, attempt_id: str, mode: str, operation: str, request: Request, gateway: State
) -> Response:
    """A model call, forwarded and recorded; streamed where the body asks for it."""
    try:
        dialect = gateway.dialects.get(operation)
        if dialect is None:
            raise CallRefused(
                f"The gateway does not serve {operation}.",
                f"It serves {', '.join(sorted(gateway.dialects))}.",
                status=404,
            )
        path = CallPath(rollout_id, attempt_id, _mode(mode))
        return await gateway.calls.open(path, dialect, await request.body(), request.headers)
    except CallRefused as refused:
        gateway.metrics.refuse(refused.http_status)
        body = dialect_of(gateway.dialects, request.url.path).error(refused)
        return JSONResponse(body, refused.http_status, refused.headers())


def _mode(text: str) -> Mode:
    if text not in get_args(Mode):
        raise CallRefused(f"There is no mode {text}.", "Use train or val.", status=404)
    return cast(Mode, text)
