"""Refusals in the shape of Anthropic's messages API. Pure."""

from __future__ import annotations

import re

from agl_runtime.gateway.internal import CallRefused, Json

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_KINDS |= {400: "invalid_request_error", 409: "invalid_request_error", 422: "invalid_request_error"}
_KINDS |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
# The numbers in what model servers say of a context overflow, however they put it.
_LIMIT = re.compile(r"(?:context|model) (?:length|size)\D*(\d+)")
_PROMPT = re.compile(r"(\d+) (?:input|prompt) tokens|prompt (?:has|contains)\D*(\d+)|request has (\d+)")
_OUTPUT = re.compile(r"(\d+) output tokens|tokens' is too large: (\d+)")


def error_body(refused: CallRefused) -> Json:
    kind = _KINDS.get(refused.http_status, "api_error")
    message = _overflow(refused.what) if refused.reason == "context_overflow" else str(refused)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _overflow(text: str) -> str:
    """A context overflow in the words by which Claude Code knows one, and what it is to make shorter."""
    limit, prompt, output = (_number(pattern, text) for pattern in (_LIMIT, _PROMPT, _OUTPUT))
    if limit and prompt and output and prompt <= limit:
        sizes = f"{prompt} + {output} > {limit}"
        return f"input length and `max_tokens` exceed context limit: {sizes}, decrease one of them and try again"
    return "prompt is too long: " + (f"{prompt} tokens > {limit} maximum" if limit and prompt else text)


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return next((int(number) for number in found.groups() if number), None) if found else None
