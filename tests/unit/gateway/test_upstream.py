"""What harnesses are told of the model server's failures. The sending itself is tested over real HTTP."""

from __future__ import annotations

import pytest

from agl_runtime.gateway.dialects import Dialect
from agl_runtime.gateway.dialects.chat import ChatDialect
from agl_runtime.gateway.dialects.messages import MessagesDialect
from agl_runtime.gateway.dialects.responses import ResponsesDialect
from agl_runtime.gateway.internal import ServerFailed
from agl_runtime.gateway.upstream import decode, refusal_for

OVERFLOW = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ServerFailed("gone"), 502),
        (ServerFailed("silent", is_silence=True), 504),
        (ServerFailed("no", status=401), 502),
        (ServerFailed("no", status=404), 502),
        (ServerFailed("busy", status=409), 502),
        (ServerFailed("broken", status=500), 500),
        (ServerFailed("busy", status=503), 503),
        (ServerFailed("busy", status=429, retry_after_s=3), 429),
        (ServerFailed("garbage", status=200), 502),
    ],
)
def test_a_fault_of_the_server_is_infrastructure(error: ServerFailed, status: int) -> None:
    refused = refusal_for(error, {})
    assert (refused.http_status, refused.reason, refused.infrastructure) == (status, "error", True)


def test_the_time_to_come_back_is_passed_on() -> None:
    assert refusal_for(ServerFailed("busy", status=429, retry_after_s=3), {}).headers() == {"retry-after": "3"}


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_mistake_of_the_agent_is_told_as_it_is(status: int) -> None:
    refused = refusal_for(ServerFailed("The server answered.", status=status, message="`n` must be positive."), {})
    assert (refused.http_status, str(refused), refused.infrastructure) == (status, "`n` must be positive.", False)


@pytest.mark.parametrize(
    "error",
    [
        ServerFailed("x", status=400, message=OVERFLOW),
        ServerFailed("x", status=400, code="context_length_exceeded", message="long"),
    ],
)
def test_a_context_overflow_is_told_by_its_own_code(error: ServerFailed) -> None:
    refused = refusal_for(error, {})
    assert (refused.http_status, refused.reason, refused.code) == (400, "context_overflow", "context_length_exceeded")
    assert str(refused) == error.message
    assert not refused.infrastructure


def test_json_with_nan_is_read_and_anything_else_is_an_upstream_error() -> None:
    assert decode(b'{"a": 1}') == {"a": 1}
    assert decode(b"[NaN]")[0] != decode(b"[NaN]")[0]
    with pytest.raises(ServerFailed, match="is no JSON"):
        decode(b"<html>")
    with pytest.raises(ServerFailed, match="is no JSON"):
        decode(b"[" * 100_000)


@pytest.mark.parametrize(
    ("dialect", "message", "told"),
    [
        (MessagesDialect(), "Unknown parameter: continue_final_message.", "stands for a last message of the assistant"),
        (MessagesDialect(), "response_format is not supported.", "stands for `output_config.format`."),
        (ResponsesDialect(), "response_format is not supported.", "stands for `text.format`."),
        (ChatDialect(), "response_format is not supported.", None),
    ],
)
def test_a_parameter_that_the_gateway_wrote_is_told_in_the_words_of_the_harness(
    dialect: Dialect, message: str, told: str | None
) -> None:
    refused = refusal_for(ServerFailed("It answered 400.", status=400, message=message), dialect.stands_for)
    assert str(refused).startswith(message)
    assert str(refused) == message if told is None else told in str(refused)
