"""The OpenAPI document of everything that the gateway serves: its routes, and the model calls, which pass those by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from agl_runtime.gateway.dialects import Dialect
from agl_runtime.gateway.dialects.schema import taking
from agl_runtime.gateway.internal import Json
from agl_runtime.gateway.routes.proxy import BASE
from agl_runtime.schemas import Mode

_REFUSALS = {
    400: "What was sent cannot be read, or not be served",
    401: "No key, or a wrong one",
    403: "The key is for something else",
    404: "No such thing",
    409: "It is over, or in another state",
    413: "Too large",
    429: "Held for too long, or too many at once: call again after Retry-After",
    503: "The store cannot be written now",
}
REFUSALS: dict[int | str, dict[str, Any]] = {status: {"description": text} for status, text in _REFUSALS.items()}
_NO_ANSWER = {"description": "The model server gave no answer, which is on record"}
_PLACE: list[Json] = [
    {"name": "rollout_id", "in": "path", "required": True, "schema": {"type": "string"}},
    {"name": "attempt_id", "in": "path", "required": True, "schema": {"type": "string"}},
    {"name": "mode", "in": "path", "required": True, "schema": {"enum": list(get_args(Mode))}},
]


def with_model_calls(document: Json, dialects: Mapping[str, Dialect]) -> Json:
    calls = {f"{BASE}/{path}": {"post": _operation(dialect)} for path, dialect in dialects.items()}
    return {**document, "paths": {**document["paths"], **calls}}


def _operation(dialect: Dialect) -> Json:
    refusals = {str(status): told for status, told in REFUSALS.items()}
    answers = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    return {
        "tags": ["proxy"],
        "summary": f"A model call: {dialect.name}",
        "parameters": _PLACE,
        **taking(dialect.schema),
        "responses": {
            "200": {"description": "The answer, as a stream where it was asked for", "content": answers},
            **refusals,
            "422": {"description": "The model server does not take what was sent"},
            **dict.fromkeys(("500", "502", "504"), _NO_ANSWER),
        },
    }
