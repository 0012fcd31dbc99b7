"""JSON bodies on their way in: what could not be kept and told again is refused at the door.

That is: no JSON, NaN and Infinity, lone surrogates, and nesting so deep that the answers which show a body cannot be
written. A body over `MODEL_CALL_BYTES` or, as an event, over `EVENT_BYTES` is refused as soon as so much has come.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.exceptions import HTTPException
from fastapi.routing import APIRoute

MODEL_CALL_BYTES = 32 * 2**20  # also of every other body but events
EVENT_BYTES = 4 * 2**20
LEVELS = 128  # that every body may have, whatever else it is
# How much deeper than its body an answer that shows it may be.
_LEVELS_AROUND = 32


def load(raw: bytes) -> Any:
    """Raises json.JSONDecodeError."""
    value = orjson.loads(raw)
    if may_be_deep(raw) and not is_tellable(value):
        raise orjson.JSONDecodeError("nested too deeply", "", 0)
    return value


def may_be_deep(raw: bytes) -> bool:
    """Whether what stands in this JSON may be nested too deeply: hardly ever, for it needs as many brackets."""
    return raw.count(b"[") + raw.count(b"{") > LEVELS


def is_tellable(value: Any) -> bool:
    """Whether answers that show the value can be written."""
    for _ in range(_LEVELS_AROUND):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


class TooLarge(Exception):
    """`str()` is a sentence for the client."""


async def read(request: Request, limit_bytes: int) -> bytes:
    """The whole body, read in pieces. Raises TooLarge."""
    pieces, size_bytes = [], 0
    async for piece in request.stream():
        size_bytes += len(piece)
        if size_bytes > limit_bytes:
            raise TooLarge(f"The request's body is larger than {limit_bytes // 2**20} MiB.")
        pieces.append(piece)
    return b"".join(pieces)


class _Request(Request):
    limit_bytes = MODEL_CALL_BYTES

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            try:
                self._body = await read(self, self.limit_bytes)
            except TooLarge as error:
                raise HTTPException(413, str(error)) from error
        return self._body

    async def json(self) -> Any:
        return load(await self.body())


class StrictRoute(APIRoute):
    """A route whose body is read by `load`; what `load` refuses is answered 422, and what is too large 413."""

    limit_bytes = MODEL_CALL_BYTES

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle: Callable[[Request], Awaitable[Response]] = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            strict = _Request(request.scope, request.receive)
            strict.limit_bytes = self.limit_bytes
            return await handle(strict)

        return strictly


class EventRoute(StrictRoute):
    limit_bytes = EVENT_BYTES
