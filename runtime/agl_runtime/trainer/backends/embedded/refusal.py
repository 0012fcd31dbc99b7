"""What the model server answers to a request that it cannot honour."""

from __future__ import annotations

from typing import Any

from agl_runtime.errors import AglError


class RequestRefused(AglError):
    """Becomes an error answer in OpenAI's shape. `param` names the request's field at fault."""

    def __init__(
        self, what: str, fix: str = "", *, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(what, fix)
        self.param = param
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
