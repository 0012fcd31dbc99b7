"""The form that every dialect is turned into, and the refusals that every dialect can tell.

A `ModelRequest` carries the request as the model server's own chat or completions API takes it, whatever the harness
spoke, and `side`: the dialect's opaque state (reversible tool names, item ids, signatures), which nobody but the
dialect reads and which goes back to the harness untouched. An `Answer` is what the model server said, with its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from agl_runtime.calls import Experts, Ids, LogProbs, VersionSpan
from agl_runtime.errors import GatewayError, UpstreamError

HELD_CODE = "gateway_paused"
Json = dict[str, Any]
Operation = Literal["chat/completions", "completions"]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """`original` is the harness's body, with what it only named put in; `body` what becomes of it; both are never
    changed. `answer_id` is what a harness may call the answer later, `continues` the answer that its history says it
    goes on from. `wants_*` say which extras the harness asked for itself: all others are stripped from its answer."""

    dialect: str
    operation: Operation
    original: Json
    body: Json
    model: str
    stream: bool
    wants_ids: bool = False
    wants_logprobs: bool = False
    wants_usage: bool = False
    answer_id: str | None = None
    continues: str | None = None
    side: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """`response` is in the model server's whole (not streamed) form. An array is empty where the server gave none that
    can be read; `logprobs` may hold NaN. `spans` is None where the server named no versions, and empty where what it
    named does not cover the sampled tokens. `finish_reason` is None for an answer that broke off. `tool_calls` maps the
    calls' ids to their arguments. `routed` [P + S - 1, layers, k] are the experts of each token but the last, None
    where the server did not tell all."""

    response: Json
    prompt_ids: Ids
    sampled_ids: Ids
    logprobs: LogProbs
    spans: tuple[VersionSpan, ...] | None
    finish_reason: str | None
    model: str | None
    usage: Json
    tool_calls: Mapping[str, str] = field(default_factory=dict)
    routed: Experts | None = None

    @property
    def choices(self) -> int:
        return len(self.response["choices"])


@dataclass(eq=False)
class CallRefused(GatewayError):
    """A model call that gets an error instead of an answer, told in its dialect's own shape.

    `reason` is what the record says. `infrastructure` marks what is neither the agent's nor the model's doing.
    """

    what: str
    fix: str = ""
    _: KW_ONLY
    http_status: int
    reason: str = "error"
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None
    infrastructure: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.what, self.fix, status=self.http_status)

    def headers(self) -> dict[str, str]:
        """What the harness's client reads: when to call again, and that a sealed attempt is not worth another try."""
        if self.http_status == 409:
            return {"x-should-retry": "false"}
        paused = {"x-agl-paused": "true"} if self.code == HELD_CODE else {}
        return paused if self.retry_after_s is None else {"retry-after": str(self.retry_after_s), **paused}


@dataclass(eq=False)
class ServerFailed(UpstreamError):
    """The model server answered with an error, whose text is `message`, or with nonsense (status 200), or not at all.

    `is_silence`: it took the request and then said nothing, so that another try would only double its work.
    `is_away`: it never took the request, for nothing listens there.
    """

    what: str
    _: KW_ONLY
    status: int | None = None
    message: str = ""
    code: str | None = None
    retry_after_s: int | None = None
    is_silence: bool = False
    is_away: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.what, "Look at the model server's log.", status=self.status)
