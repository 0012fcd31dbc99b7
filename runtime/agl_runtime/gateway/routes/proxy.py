"""Where agents call their model: one base URL for each rollout, attempt and mode."""

from __future__ import annotations

from typing import cast, get_args

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from agl_runtime.gateway import bodies
from agl_runtime.gateway.access import dialect_of
from agl_runtime.gateway.internal import CallRefused
from agl_runtime.gateway.routes.context import State, gateway_of
from agl_runtime.schemas import Mode

BASE = "/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}"
router = APIRouter(tags=["proxy"])


@router.get(BASE + "/openai/v1/models")
async def models(rollout_id: str, attempt_id: str, mode: str, gateway: State) -> dict[str, object]:
    """The names that the policy answers to, as OpenAI's list."""
    rows = [{"id": name, "object": "model", "created": 0, "owned_by": "agl"} for name in gateway.registry.names()]
    return {"object": "list", "data": rows}


@router.post(BASE + "/{operation:path}", response_class=Response)
async def call(request: Request) -> Response:
    """A model call, forwarded and recorded; streamed where the body asks for it."""
    # Every call of every agent comes through here: it reads its path itself, which costs a tenth of FastAPI's way.
    gateway, path, operation = gateway_of(request), request.path_params, request.path_params["operation"]
    try:
        dialect = gateway.dialects.get(operation)
        if dialect is None:
            what = f"The gateway does not serve {operation}."
            raise CallRefused(what, f"It serves {', '.join(sorted(gateway.dialects))}.", http_status=404)
        names = path["rollout_id"], path["attempt_id"], _mode(path["mode"])
        return await gateway.calls.open(*names, dialect, await _body(request), request.headers)
    except CallRefused as refused:
        gateway.metrics.refused[refused.http_status] += 1
        body = dialect_of(gateway.dialects, request.url.path).error(refused)
        return JSONResponse(body, refused.http_status, refused.headers())


async def _body(request: Request) -> bytes:
    try:
        return await bodies.read(request, bodies.MODEL_CALL_BYTES)
    except bodies.TooLarge as error:
        raise CallRefused(str(error), "Send a shorter conversation.", http_status=413) from error


def _mode(text: str) -> Mode:
    if text not in get_args(Mode):
        raise CallRefused(f"There is no mode {text}.", "Use train or val.", http_status=404)
    return cast(Mode, text)
