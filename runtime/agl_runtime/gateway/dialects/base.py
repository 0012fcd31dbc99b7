"""Where a dialect plugs in: everything that one wire format needs, in one file, listed in `dialects/__init__.py`.

A dialect turns a harness's body into a `ModelRequest`, an `Answer` into its own answer, a model server's chunks into
its own events, and a refusal into its own error. It does no I/O, knows neither keys nor the store, and keeps no state
beyond one answer: what it needs later it puts into `ModelRequest.side`.

Order of a streamed answer: `feed` for every chunk before the one that finishes the answer, as it comes; then, once the
call is recorded, `feed` for what is left and `end`. A dialect whose harness acts on a tool call before the terminal
event gives that event out in `end`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from agl_runtime.gateway.internal import Answer, CallRefused, Json, ModelRequest

Recorded = tuple[Json, Json]
"""The request and the answer of a recorded call, as the dialect said them."""


class SelfContained:
    """Of dialects whose requests hold the whole conversation."""

    stands_for: Mapping[str, str] = {}

    def named(self, body: Json) -> set[str]:
        return set()

    def completed(self, body: Json, recorded: Mapping[str, Recorded]) -> Json:
        return body


class EventStream(Protocol):
    """Writes the events of one streamed answer."""

    def feed(self, chunk: Json) -> bytes:
        """The events for one chunk of the model server, whose dicts may be changed; empty when it holds nothing for
        the harness."""
        ...

    def end(self, answer: Answer) -> bytes:
        """The events that end the stream."""
        ...

    def fail(self, refused: CallRefused) -> bytes:
        """The error within a stream that has begun, perhaps with nothing but keep-alives; nothing follows it."""
        ...


class Dialect(Protocol):
    @property
    def name(self) -> str:
        """As it stands in the record: chat, completions, ..."""
        ...

    @property
    def path(self) -> str:
        """Below a rollout's base: "openai/v1/chat/completions"."""
        ...

    @property
    def keep_alive(self) -> bytes:
        """What a held stream says meanwhile; harmless to every reader of this dialect."""
        ...

    @property
    def schema(self) -> Json:
        """What `parse` takes, as far as a JSON schema can say it; unknown fields are tolerated."""
        ...

    @property
    def stands_for(self) -> Mapping[str, str]:
        """By a parameter of the model server's, what the body has in its place: for errors about the former."""
        ...

    def named(self, body: Json) -> set[str]:
        """Ids of the earlier answers that the body names in place of what they said. Raises CallRefused."""
        ...

    def completed(self, body: Json, recorded: Mapping[str, Recorded]) -> Json:
        """The body with what it names put in. `recorded` holds, by id, those of the answers named that the attempt
        has. Raises CallRefused where one is missing."""
        ...

    def parse(self, body: Json) -> ModelRequest:
        """Raises CallRefused with a sentence that says what to change."""
        ...

    def render(self, request: ModelRequest, answer: Answer) -> Json:
        """The whole answer, as it is recorded also for a stream."""
        ...

    def stream(self, request: ModelRequest) -> EventStream: ...

    def replay(self, request: ModelRequest, response: Json) -> bytes:
        """A recorded answer as a whole event stream."""
        ...

    def error(self, refused: CallRefused) -> Json: ...

    def conversation(self, request: Json, response: Json) -> Json:
        """A recorded body and its recorded answer as one chat body: `messages`, and `tools` where there are some. A
        response that holds nothing of an answer adds no message."""
        ...
