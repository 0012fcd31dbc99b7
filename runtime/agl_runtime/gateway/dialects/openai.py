"""What the chat and the completions API have in common: the model server speaks them too, so answers pass through.

Taken away is what the harness did not ask for: token ids, routed experts, policy versions, log-probabilities, usage,
and the chunks that held nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from agl_runtime.gateway.dialects.base import SelfContained
from agl_runtime.gateway.internal import Answer, CallRefused, Json, ModelRequest, Operation

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_TOKEN_FIELDS = frozenset({"prompt_token_ids", "token_ids", "weight_versions"})
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_KINDS |= {409: "conflict_error", 413: "invalid_request_error", 422: "invalid_request_error", 429: "rate_limit_error"}


class OpenAIStream:
    """Chunks pass through, without what was not asked for."""

    def __init__(self, request: ModelRequest) -> None:
        self._request = request
        self._wants_tokens = request.wants_ids or request.wants_logprobs

    def feed(self, chunk: Json) -> bytes:
        _strip(self._request, chunk)
        if not self._request.wants_usage:
            chunk.pop("usage", None)
        choices = chunk["choices"]
        for row in choices:
            if self._wants_tokens or row.get("delta") or row.get("text") or row.get("finish_reason"):
                return event(chunk)
        return b"" if choices or "usage" not in chunk else event(chunk)

    def end(self, answer: Answer) -> bytes:
        return DONE

    def fail(self, refused: CallRefused) -> bytes:
        return event(error_body(refused))


class OpenAIDialect(SelfContained):
    """The parts that both APIs share; `name`, `operation`, `chunk` and `parse` differ."""

    name: str
    operation: Operation
    chunk: str
    """The `object` of a stream's chunks."""
    keep_alive = KEEP_ALIVE

    @property
    def path(self) -> str:
        return f"openai/v1/{self.operation}"

    def render(self, request: ModelRequest, answer: Answer) -> Json:
        return strip(request, answer.response)

    def stream(self, request: ModelRequest) -> OpenAIStream:
        return OpenAIStream(request)

    def replay(self, request: ModelRequest, response: Json) -> bytes:
        head = {key: value for key, value in response.items() if key not in ("choices", "usage")} | {
            "object": self.chunk
        }
        choices = response["choices"]
        chunks = [{**head, "choices": [self.replayed(choice)]} for choice in choices]
        if request.wants_usage:
            chunks.append({**head, "choices": [], "usage": response.get("usage")})
        return b"".join(event(chunk) for chunk in chunks) + DONE

    def replayed(self, choice: Json) -> Json:
        """A whole choice as that of a chunk."""
        return choice

    def error(self, refused: CallRefused) -> Json:
        return error_body(refused)


def error_body(refused: CallRefused) -> Json:
    kind = _KINDS.get(refused.http_status, "server_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


def event(data: Json) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def strip(request: ModelRequest, response: Json) -> Json:
    """A copy of a whole answer without what the harness did not ask for."""
    slim = {**response, "choices": [choice.copy() for choice in response["choices"]]}
    _strip(request, slim)
    return slim


def _strip(request: ModelRequest, slim: Json) -> None:
    choices = slim["choices"]
    for choice in choices:
        choice.pop("routed_experts", None)
    if not request.wants_ids:
        for row in (slim, *choices):
            for key in _TOKEN_FIELDS:
                row.pop(key, None)
    if not request.wants_logprobs:
        for choice in choices:
            if "logprobs" in choice:
                choice["logprobs"] = None


def common(body: Json) -> Mapping[str, Any]:
    """The arguments of a `ModelRequest` that both APIs read in the same way. Raises CallRefused."""
    stream = body.get("stream")
    options = body.get("stream_options")
    model = body.get("model")
    require(stream is None or isinstance(stream, bool), "`stream` must be true or false.")
    require(options is None or isinstance(options, dict), "`stream_options` must be an object.")
    require(model is None or isinstance(model, str), "`model` must be a string.")
    return {
        "original": body,
        "body": body,
        "model": model or "",
        "stream": bool(stream),
        "wants_ids": body.get("return_token_ids") is True,
        "wants_logprobs": body.get("logprobs") not in (None, False),
        "wants_usage": bool((options or {}).get("include_usage")),
    }


def first_choice(response: Json) -> Json:
    """Empty where a recorded answer has none."""
    choices: list[Json] = response.get("choices") or [{}]
    return choices[0]


def require(holds: bool, sentence: str) -> None:
    if not holds:
        raise CallRefused(sentence, http_status=400)


def is_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
