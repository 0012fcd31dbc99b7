"""The wire formats that harnesses speak; a new one is a file beside these and a line here."""

from __future__ import annotations

from agl_runtime.gateway.dialects.base import Dialect, EventStream
from agl_runtime.gateway.dialects.chat import ChatDialect
from agl_runtime.gateway.dialects.completions import CompletionsDialect
from agl_runtime.gateway.dialects.messages import MessagesDialect
from agl_runtime.gateway.dialects.responses import ResponsesDialect


def all_dialects() -> dict[str, Dialect]:
    """By their path below a rollout's base."""
    dialects: list[Dialect] = [ChatDialect(), CompletionsDialect(), ResponsesDialect(), MessagesDialect()]
    return {dialect.path: dialect for dialect in dialects}


__all__ = ["Dialect", "EventStream", "all_dialects"]
