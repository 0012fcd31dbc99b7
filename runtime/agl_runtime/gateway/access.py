"""The door: every request is judged before any route sees it, and refused in the shape that its client reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_runtime.gateway.auth import Caller, Denial, identify, judge
from agl_runtime.gateway.dialects import Dialect
from agl_runtime.gateway.internal import CallRefused

PROXY_PREFIX = "/proxy/rollout/"
KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
MOST_KNOWN = 4096


@dataclass
class KeyGate:
    """ASGI middleware. Leaves the caller in `scope["state"]["caller"]`. Knows again the keys that came last."""

    app: ASGIApp
    admin_key: str = field(repr=False)
    dialects: dict[str, Dialect]
    _known: dict[tuple[tuple[bytes, bytes], ...], Caller] = field(default_factory=dict, repr=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        caller = self._caller(tuple([header for header in scope["headers"] if header[0] in KEY_HEADERS]))
        denial = judge(caller, scope["method"], scope["path"])
        if denial is not None:
            await JSONResponse(self._error(denial, scope["path"]), denial.status)(scope, receive, send)
        else:
            scope.setdefault("state", {})["caller"] = caller
            await self.app(scope, receive, send)

    def _caller(self, headers: tuple[tuple[bytes, bytes], ...]) -> Caller | None:
        caller = self._known.get(headers)
        if caller is None:
            told = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
            caller = identify(self.admin_key, told)
            if caller is not None:
                if len(self._known) == MOST_KNOWN:
                    self._known.clear()
                self._known[headers] = caller
        return caller

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
