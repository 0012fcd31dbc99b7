"""What clients of Anthropic's API ask for beside messages: models, token counts, and whether anyone is there."""

from __future__ import annotations

import json
import re

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from agl_runtime.gateway.dialects.messages import PATH, MessagesDialect
from agl_runtime.gateway.dialects.schema import taking
from agl_runtime.gateway.internal import Json
from agl_runtime.gateway.routes.context import NotRevoked, State
from agl_runtime.gateway.routes.proxy import BASE, raw_body
from agl_runtime.gateway.service import load

# Characters of JSON that make a token, roughly; only where no model server can count.
_CHARACTERS_A_TOKEN = 4
_IMAGE_DATA = re.compile(r'"data:[^"]*"')
router = APIRouter(tags=["proxy"])


@router.head(BASE + "/anthropic/api/hello", include_in_schema=False)
@router.get(BASE + "/anthropic/api/hello")
async def hello() -> dict[str, str]:
    """Needs no key: clients ask before they have one to send."""
    return {"status": "ok"}


@router.get(BASE + "/anthropic/v1/models", dependencies=[NotRevoked])
async def models(gateway: State) -> Json:
    """The names that the policy answers to, as Anthropic's list."""
    rows = [_model(name) for name in gateway.registry.names()]
    return {"data": rows, "has_more": False, "first_id": rows[0]["id"], "last_id": rows[-1]["id"]}


@router.get(BASE + "/anthropic/v1/models/{name:path}", dependencies=[NotRevoked])
async def model(name: str) -> Json:
    """Any name means the policy."""
    return _model(name)


@router.post(BASE + f"/{PATH}/count_tokens", dependencies=[NotRevoked], openapi_extra=taking(MessagesDialect.schema))
async def count_tokens(rollout_id: str, request: Request, gateway: State) -> Response:
    """Counted by the model server's own template where it can, which `x-agl-token-count` tells; never recorded."""
    asked = gateway.dialects[PATH].parse(load(await raw_body(request)))
    prompt: Json = {key: asked.body[key] for key in ("messages", "tools") if key in asked.body}
    name = gateway.registry.resolve(asked.model)
    count = await gateway.upstream.count_tokens(name, rollout_id, {**prompt, "model": name})
    by = "server" if count is not None else "estimate"
    if count is None:
        text = _IMAGE_DATA.sub("", json.dumps(prompt, ensure_ascii=False))
        count = -(-len(text) // _CHARACTERS_A_TOKEN)
    return JSONResponse({"input_tokens": count}, headers={"x-agl-token-count": by})


def _model(name: str) -> Json:
    about = {"display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
    return {"type": "model", "id": name, **about}
