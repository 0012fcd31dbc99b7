"""What the OpenAPI document tells of bodies: as much as leads a client to a call that is served. Pure."""

from __future__ import annotations

from agl_runtime.gateway.internal import Json

OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
_PART = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}, "text": {"type": "string"}}}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}


def body_of(**fields: Json) -> Json:
    """The schema of a body, of which the first of `fields` is what must be there."""
    common: Json = {"model": {"type": ["string", "null"]}, "stream": {"type": ["boolean", "null"]}}
    common["tools"] = OBJECTS
    return {"type": "object", "required": [next(iter(fields))], "properties": {**common, **fields}}


def taking(schema: Json) -> Json:
    """What is told of an operation that takes such a body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def talk_of(*roles: str) -> Json:
    """The schema of a list of messages."""
    message = {"role": {"enum": list(roles)}, "content": _CONTENT}
    items = {"type": "object", "required": ["role"], "properties": message}
    return {"type": "array", "minItems": 1, "items": items}
