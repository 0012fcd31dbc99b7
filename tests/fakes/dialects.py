"""One request in the words of each dialect, and how its answers are read: for tests that hold for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import pytest

from fakes.running_gateway import RunningGateway

Raw = dict[str, Any]
TALK = [{"role": "user", "content": "x"}]


@dataclass(frozen=True)
class Way:
    """A dialect, asked whole or as a stream. `path` is below a rollout's base, `end` what ends a good stream."""

    dialect: str
    path: str
    asked: Raw
    end: bytes
    stream: bool = False

    def __str__(self) -> str:
        return f"{self.dialect}-{'streamed' if self.stream else 'whole'}"

    @property
    def body(self) -> Raw:
        return {**self.asked, "stream": self.stream}

    def url(self, gateway: RunningGateway, rollout_id: str = "r1") -> str:
        return f"{gateway.base(rollout_id, api='')}{self.path}"

    async def ask(
        self, gateway: RunningGateway, rollout_id: str = "r1", *, marked: bool = False, **more: Any
    ) -> httpx.Response:
        """The answer; `marked` as a retry of the same request."""
        headers = {"x-stainless-retry-count": "1"} if marked else {}
        return await gateway.http.post(self.url(gateway, rollout_id), json={**self.body, **more}, headers=headers)

    def is_whole(self, reply: httpx.Response) -> bool:
        """Whether it came to a good end."""
        return reply.status_code == 200 and (not self.stream or self.end in reply.content)

    def error_of(self, reply: httpx.Response) -> str:
        """The sentence of an error, also of one within a stream, which must be its last event."""
        is_stream = "event-stream" in reply.headers["content-type"]
        told = orjson.loads(reply.content.strip().rsplit(b"data: ", 1)[1] if is_stream else reply.content)
        return str((told.get("response") or told)["error"]["message"])


_KINDS = [
    Way("chat", "openai/v1/chat/completions", {"model": "policy", "messages": TALK}, b"data: [DONE]"),
    Way("completions", "openai/v1/completions", {"model": "policy", "prompt": "say x"}, b"data: [DONE]"),
    Way("responses", "openai/v1/responses", {"model": "policy", "input": "x"}, b"event: response.completed"),
    Way(
        "messages",
        "anthropic/v1/messages",
        {"model": "policy", "max_tokens": 9, "messages": TALK},
        b"event: message_stop",
    ),
]
WAYS = [Way(kind.dialect, kind.path, kind.asked, kind.end, stream) for kind in _KINDS for stream in (False, True)]
WITH_TOOLS = [way for way in WAYS if way.dialect != "completions"]
in_every_way = pytest.mark.parametrize("way", WAYS, ids=str)
in_every_way_with_tools = pytest.mark.parametrize("way", WITH_TOOLS, ids=str)
