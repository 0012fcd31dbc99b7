"""JSON bodies on their way in: what could not be kept and told again is refused at the door.

That is: no JSON, NaN and Infinity, lone surrogates, and nesting so deep that the answers which show a body cannot be
written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

# How much deeper than its body an answer that shows it may be.
_LEVELS_AROUND = 32


def load(raw: bytes) -> Any:
    """Raises json.JSONDecodeError."""
    value = orjson.loads(raw)
    if not is_tellable(value):
        raise orjson.JSONDecodeError("nested too deeply", "", 0)
    return value


def is_tellable(value: Any) -> bool:
    """Whether answers that show the value can be written."""
    for _ in range(_LEVELS_AROUND):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return False
    return True


class _Request(Request):
    async def json(self) -> Any:
        return load(await self.body())


class StrictRoute(APIRoute):
    """A route whose body is read by `load`; what `load` refuses is answered 422."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle: Callable[[Request], Awaitable[Response]] = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return strictly
