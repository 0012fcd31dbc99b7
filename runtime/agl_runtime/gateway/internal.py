"""The form that every dialect is turned into, and the refusals that every dialect can tell.

A `ModelRequest` carries the request as the model server's own chat or completions API takes it, whatever the harness
spoke, and `side`: the dialect's opaque state (reversible tool names, item ids, signatures), which nobody but the
dialect reads and which goes back to the harness untouched. An `Answer` is what the model server said, with its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agl_runtime.calls import Ids, LogProbs, VersionSpan
from agl_runtime.errors import GatewayError

HELD_CODE = "gateway_paused"
Json = dict[str, Any]
Operation = Literal["chat/completions", "completions"]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """`original` is the harness's body, `body` what becomes of it; both are never changed. `wants_*` say which extras
    the harness asked for itself: all others are stripped from its answer."""

    dialect: str
    operation: Operation
    original: Json
    body: Json
    model: str
    stream: bool
    wants_ids: bool = False
    wants_logprobs: bool = False
    wants_usage: bool = False
    side: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """`response` is in the model server's whole (not streamed) form. An array is None where the server gave none that
    can be read; `logprobs` may hold NaN. `spans` is None where the server named no versions, and empty where what it
    named does not cover the sampled tokens. `finish_reason` is None for an answer that broke off."""

    response: Json
    prompt_ids: Ids | None
    sampled_ids: Ids | None
    logprobs: LogProbs | None
    spans: tuple[VersionSpan, ...] | None
    finish_reason: str | None
    model: str | None
    usage: Json
    choices: int
    tool_call_ids: tuple[str, ...] = ()


class CallRefused(GatewayError):
    """A model call that gets an error instead of an answer, told in its dialect's own shape.

    `reason` is what the record says. `infrastructure` marks what is neither the agent's nor the model's doing.
    """

    def __init__(
        self,
        what: str,
        fix: str = "",
        *,
        status: int,
        reason: str = "error",
        code: str | None = None,
        retry_after_s: int | None = None,
        infrastructure: bool = False,
    ) -> None:
        super().__init__(what, fix, status=status)
        self.http_status = status
        self.reason = reason
        self.code = code
        self.retry_after_s = retry_after_s
        self.infrastructure = infrastructure

    def headers(self) -> dict[str, str]:
        """What the harness's client reads: when to call again, and that a sealed attempt is not worth another try."""
        if self.http_status == 409:
            return {"x-should-retry": "false"}
        paused = {"x-agl-paused": "true"} if self.code == HELD_CODE else {}
        return paused if self.retry_after_s is None else {"retry-after": str(self.retry_after_s), **paused}
