"""The way to the model servers: one try after another until the first byte, and never a second answer after it.

A try is repeated, with growing pauses, when the server dropped the connection unanswered, or answered 408, 409, 429 or
5xx; on the rollout's next endpoint where its own seems dead. A call whose server cannot be reached at all is held,
as if no model were registered: a trainer that was killed serves again soon, maybe elsewhere. Leaving `send` closes a
connection whose answer was not read to its end, which tells the model server to stop generating.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Any

import orjson

from agl_runtime.gateway.bodies import is_tellable, may_be_deep
from agl_runtime.gateway.hold import Hold
from agl_runtime.gateway.internal import HELD_CODE, CallRefused, Json, Operation, ServerFailed
from agl_runtime.gateway.registry import Registry
from agl_runtime.gateway.wire import Response, Silent, Unreachable, Wire, WireFailed
from agl_runtime.schemas import Model

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0
LONGEST_AWAY_PAUSE_S = 2.0
COUNT_TIMEOUT_S = 10.0
RETRIED_STATUSES = frozenset({408, 409, 429})
DEAD_STATUSES = frozenset({None, 502, 503, 504})  # a single 500 would cost all its rollouts their caches
OVERFLOW_CODE = "context_length_exceeded"
Body = Callable[[Model], bytes]  # what a server is sent: its policy version stands in it
DONE = b"[DONE]"
# vLLM gives a context overflow no code of its own.
_OVERFLOW_PHRASES = ("maximum context length", "maximum model length", "maximum context size")


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that has begun. `model` is its server as it was registered when the call was sent."""

    model: Model
    retries: int
    _response: Response

    async def json(self) -> Any:
        """The whole body, however deeply nested. Raises ServerFailed when it breaks off, stays silent, is no JSON, or
        holds half characters, which no dialect can write."""
        with _Told(self.model):
            value, is_plain = _parse(await self._response.read())
        return value if is_plain else _tellable(value)

    async def events(self) -> AsyncIterator[list[bytes]]:
        """The data of an event stream to its [DONE] or its end, as lists of what came together. Raises ServerFailed."""
        if self._response.headers.get("content-type", "").split(";")[0].strip().lower() != "text/event-stream":
            raise ServerFailed("The model server did not answer with an event stream.", status=200)
        with _Told(self.model):
            async for events in _events(self._response):
                if DONE in events:
                    yield events[: events.index(DONE)]
                    return
                yield events


@dataclass
class Upstream:
    """`keys` maps endpoints to the keys that they want
    where their registration names none; `pause` sleeps between tries."""

    registry: Registry
    hold: Hold
    retries: int
    idle_timeout_s: float
    keys: Mapping[str, str] = field(repr=False)
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._wire = Wire(self.idle_timeout_s)

    def close(self) -> None:
        self._wire.close()

    @asynccontextmanager
    async def send(
        self, name: str, rollout_id: str, operation: Operation, body: Body, keep_alive: Callable[[], None]
    ) -> AsyncIterator[Reply]:
        """For a call in flight. Raises ServerFailed when no server of the model `name` gave an answer."""
        reply = await self._first_answer(name, rollout_id, operation, body, keep_alive)
        try:
            yield reply
        finally:
            reply._response.close()

    async def count_tokens(self, name: str, rollout_id: str, body: Json) -> int | None:
        """Of a chat body's prompt, by a model server that has vLLM's /tokenize; None where none can tell."""
        model = self.registry.route(name, rollout_id)
        if model is None:
            return None
        base = model.endpoint.rstrip("/").removesuffix("/v1")
        try:
            async with asyncio.timeout(COUNT_TIMEOUT_S):
                response = await self._post(model, f"{base}/tokenize", orjson.dumps(body))
                with closing(response):
                    counted = await Reply(model, 0, response).json()
        except (ServerFailed, TimeoutError):
            return None
        count = counted.get("count") if isinstance(counted, dict) else None
        return count if type(count) is int else None

    async def _first_answer(
        self, name: str, rollout_id: str, operation: Operation, body: Body, keep_alive: Callable[[], None]
    ) -> Reply:
        tried, outages, away_since = 0, 0, 0.0
        while True:
            model = self.registry.route(name, rollout_id)
            try:
                if model is None:
                    raise ServerFailed("The model server was withdrawn.", is_away=True)
                return Reply(
                    model, tried, await self._post(model, f"{model.endpoint.rstrip('/')}/{operation}", body(model))
                )
            except ServerFailed as error:
                if model is not None and error.status in DEAD_STATUSES:
                    self.registry.report_failure(model)
                if error.is_away:
                    away_since = away_since if outages else self.hold.clock()
                    pause_s = min(_pause_s(outages, None), LONGEST_AWAY_PAUSE_S)
                    if not await self.hold.outlast(away_since, pause_s, keep_alive):
                        raise self._given_up(error) from error
                    outages += 1
                    continue
                if tried >= self.retries or not _may_retry(error):
                    raise
                await self.pause(_pause_s(tried, error.retry_after_s))
            tried += 1

    def _given_up(self, error: ServerFailed) -> ServerFailed:
        what = f"{error.what} The call was held for as long as gateway.hold_limit_s allows."
        after_s = self.hold.state().retry_after_seconds
        return ServerFailed(what, status=429, code=HELD_CODE, retry_after_s=after_s)

    async def _post(self, model: Model, url: str, body: bytes) -> Response:
        key = model.api_key.get_secret_value() if model.api_key else self.keys.get(model.endpoint)
        with _Told(model):
            response = await self._wire.post(url, body, key)
            if response.status < 400:
                return response
            with closing(response):
                raise _rejection(model, response, await response.read())


@dataclass(frozen=True, slots=True)
class _Told:
    """Within it what the wire raises becomes ServerFailed."""

    model: Model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WireFailed):
            what = f"The model server at {self.model.endpoint} {error}."
            is_silence, is_away = isinstance(error, Silent), isinstance(error, Unreachable)
            raise ServerFailed(what, is_silence=is_silence, is_away=is_away) from error


def refusal_for(error: ServerFailed, stands_for: Mapping[str, str]) -> CallRefused:
    """What the harness is told: its own mistakes as they are, everything else as a fault of the infrastructure.
    `stands_for` is the dialect's."""
    status = error.status
    if status in (400, 413, 422):
        if _is_overflow(error):
            return CallRefused(error.message, http_status=400, reason="context_overflow", code=OVERFLOW_CODE)
        meant = "".join(f" `{name}` stands for {its}." for name, its in stands_for.items() if name in error.message)
        return CallRefused(error.message + meant, http_status=status)
    told = status if status is not None and (status == 429 or status >= 500) else 504 if error.is_silence else 502
    code, after_s = error.code, error.retry_after_s
    return CallRefused(error.what, error.fix, http_status=told, code=code, retry_after_s=after_s, infrastructure=True)


def decode(data: bytes) -> Any:
    """JSON as model servers write it, with NaN and Infinity. Raises ServerFailed, also for what cannot be recorded."""
    return _tellable(_parse(data)[0])


def _tellable(value: Any) -> Any:
    if not is_tellable(value):
        raise ServerFailed("The model server's answer holds what cannot be told again.", status=200)
    return value


def _parse(data: bytes) -> tuple[Any, bool]:
    """The value, and whether it is strict JSON. Raises ServerFailed."""
    try:
        return orjson.loads(data), True
    except orjson.JSONDecodeError:
        try:
            return json.loads(data), False
        except (ValueError, RecursionError) as error:
            raise ServerFailed("The model server's answer is no JSON.", status=200) from error


def read_chunk(data: bytes) -> Json:
    """One event's object. Raises ServerFailed for an error within the stream, and for what is no object."""
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        chunk = decode(data)
    if may_be_deep(data):
        chunk = _tellable(chunk)
    if not isinstance(chunk, dict) or "error" in chunk:
        raise ServerFailed(f"The model server broke off: {_message(chunk)}", status=200)
    return chunk


def _may_retry(error: ServerFailed) -> bool:
    return not error.is_silence and (error.status is None or error.status in RETRIED_STATUSES or error.status >= 500)


def _pause_s(tried: int, retry_after_s: int | None) -> float:
    pause_s = min(FIRST_PAUSE_S * 2.0**tried, LONGEST_PAUSE_S)
    return max(pause_s, min(retry_after_s or 0.0, LONGEST_PAUSE_S)) * random.uniform(0.75, 1.25)


def _rejection(model: Model, response: Response, data: bytes) -> ServerFailed:
    try:
        body = decode(data)
    except ServerFailed:
        body = data.decode(errors="replace")
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    after = response.headers.get("retry-after", "")
    return ServerFailed(
        f"The model server at {model.endpoint} answered {response.status}: {_message(body)}",
        status=response.status,
        message=_message(body),
        code=code if isinstance(code, str) else None,
        retry_after_s=int(after) if after.isdecimal() else None,
    )


def _message(body: Any) -> str:
    """The sentence in an error body, whatever its shape, cut to a length that fits a log line."""
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    text = body if isinstance(body, str) else json.dumps(body, default=str)
    return text.strip()[:1000]


def _is_overflow(error: ServerFailed) -> bool:
    return error.code == OVERFLOW_CODE or any(phrase in error.message for phrase in _OVERFLOW_PHRASES)


async def _events(response: Response) -> AsyncIterator[list[bytes]]:
    """The `data:` fields of a stream; lines may be of any length (the first holds a whole prompt's ids)."""
    rest = b""
    async for piece in response.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        if events := [line[5:].strip() for line in lines if line.startswith(b"data:")]:
            yield events
