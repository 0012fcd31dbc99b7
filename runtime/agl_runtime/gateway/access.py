"""The door: every request is judged before any route sees it, and refused in the shape that its client reads."""

from __future__ import annotations

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_runtime.gateway.auth import Denial, identify, judge
from agl_runtime.gateway.dialects import Dialect
from agl_runtime.gateway.internal import CallRefused

PROXY_PREFIX = "/proxy/rollout/"


class KeyGate:
    """ASGI middleware. Leaves the caller in `scope["state"]["caller"]`."""

    def __init__(self, app: ASGIApp, *, admin_key: str, dialects: dict[str, Dialect]) -> None:
        self._app = app
        self._admin_key = admin_key
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        caller = identify(self._admin_key, headers)
        denial = judge(caller, scope["method"], scope["path"])
        if denial is not None:
            await self._refuse(denial, scope["path"], send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)

    async def _refuse(self, denial: Denial, path: str, send: Send) -> None:
        body = orjson.dumps(self._error(denial, path))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": denial.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _error(self, denial: Denial, path: str) -> dict[str, object]:
        if not path.startswith(PROXY_PREFIX):
            return {"detail": denial.sentence}
        return dialect_of(self._dialects, path).error(CallRefused(denial.sentence, status=denial.status))


def dialect_of(dialects: dict[str, Dialect], path: str) -> Dialect:
    """The dialect in which a client of this path reads errors; the first one's for a path that none serves."""
    named = (dialect for tail, dialect in dialects.items() if path.endswith(f"/{tail}"))
    return next(named, next(iter(dialects.values())))
