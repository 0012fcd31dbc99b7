"""What the chat and the completions API have in common: the model server speaks them too, so answers pass through.

Taken away is what the harness did not ask for: token ids, policy versions, log-probabilities, usage, and the chunks
that held nothing else.
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

    def feed(self, chunk: Json) -> bytes:
        slim = strip(self._request, chunk)
        if not self._request.wants_usage:
            slim.pop("usage", None)
        choices = slim["choices"]
        says_something = any([self._says_something(choice) for choice in choices]) if choices else "usage" in slim
        return event(slim) if says_something else b""

    def end(self, answer: Answer) -> bytes:
        return DONE

    def fail(self, refused: CallRefused) -> bytes:
        return event(error_body(refused))

    def _says_something(self, choice: Json) -> bool:
        asked = self._request.wants_ids or self._request.wants_logprobs
        return asked or bool(choice.get("delta") or choice.get("text") or choice.get("finish_reason"))


class OpenAIDialect(SelfContained):
    """The parts that both APIs share; `name`, `operation` and `parse` differ."""

    name: str
    operation: Operation
    keep_alive = KEEP_ALIVE

    @property
    def path(self) -> str:
        return f"openai/v1/{self.operation}"

    def render(self, request: ModelRequest, answer: Answer) -> Json:
        return strip(request, answer.response)

    def stream(self, request: ModelRequest) -> OpenAIStream:
        return OpenAIStream(request)

    def replay(self, request: ModelRequest, response: Json) -> bytes:
        head = {key: value for key, value in response.items() if key not in ("choices", "usage")}
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
    """A copy of a whole answer or a chunk without what the harness did not ask for."""
    if request.wants_ids and request.wants_logprobs:
        return dict(response)
    hidden = frozenset() if request.wants_ids else _TOKEN_FIELDS
    slim = _without(hidden, response)
    slim["choices"] = [_strip_choice(choice, hidden, request.wants_logprobs) for choice in response["choices"]]
    return slim


def _without(hidden: frozenset[str], row: Json) -> Json:
    slim = row.copy()
    for key in hidden:
        slim.pop(key, None)
    return slim


def _strip_choice(choice: Json, hidden: frozenset[str], with_logprobs: bool) -> Json:
    slim = _without(hidden, choice)
    if not with_logprobs and "logprobs" in slim:
        slim["logprobs"] = None
    return slim


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
