"""The door: every request is judged before any route sees it, and refused in the shape that its client reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_runtime.gateway.auth import Denial, identify, judge
from agl_runtime.gateway.dialects import Dialect
from agl_runtime.gateway.internal import CallRefused

PROXY_PREFIX = "/proxy/rollout/"


@dataclass
class KeyGate:
    """ASGI middleware. Leaves the caller in `scope["state"]["caller"]`."""

    app: ASGIApp
    admin_key: str = field(repr=False)
    dialects: dict[str, Dialect]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        caller = identify(self.admin_key, headers)
        denial = judge(caller, scope["method"], scope["path"])
        if denial is not None:
            await JSONResponse(self._error(denial, scope["path"]), denial.status)(scope, receive, send)
        else:
            scope.setdefault("state", {})["caller"] = caller
            await self.app(scope, receive, send)

    def _error(self, denial: Denial, path: str) -> dict[str, object]:
        if not path.startswith(PROXY_PREFIX):
            return {"detail": denial.sentence}
        return dialect_of(self.dialects, path).error(CallRefused(denial.sentence, http_status=denial.status))


def dialect_of(dialects: dict[str, Dialect], path: str) -> Dialect:
    """The dialect in which a client of this path reads errors; for a path that none serves, one of the same vendor's,
    or else the first."""
    tail = path.split("/", 8)[-1]  # behind /proxy/rollout/../attempt/../mode/../
    vendor = (dialect for name, dialect in dialects.items() if name.split("/")[0] == tail.split("/")[0])
    return dialects.get(tail) or next(vendor, next(iter(dialects.values())))
