"""The life of one model call, in the order that makes the record true.

    parse -> held while the weights change -> intent (durable) -> model server -> commit (durable) -> last byte
          -> delivered

Content of a stream is passed on as it comes; what finishes an answer is held back until the call is committed, so that
whatever an agent acts on is on record. A retry that carries its mark is joined to the call that still runs, or answered
from the record; it is never sampled again. A call whose reader left is cancelled at the model server and kept as `cut`.
When the gateway stops, a call that still runs stays an intent, and its attempt visibly incomplete.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from json import JSONDecodeError

from starlette.responses import Response

from agl_runtime.config import Config
from agl_runtime.gateway import bodies
from agl_runtime.gateway.attempts import Attempt, Attempts, Call
from agl_runtime.gateway.capture import StreamAssembler, forget_tokens, is_terminal, read_answer
from agl_runtime.gateway.dialects import Dialect
from agl_runtime.gateway.dialects.base import Recorded
from agl_runtime.gateway.exchange import Exchange, ExchangeResponse, Reading
from agl_runtime.gateway.hold import KEEP_ALIVE_S, Hold
from agl_runtime.gateway.internal import Answer, CallRefused, Json, ModelRequest, ServerFailed
from agl_runtime.gateway.metrics import Metrics
from agl_runtime.gateway.parents import is_auxiliary
from agl_runtime.gateway.prepare import prepare
from agl_runtime.gateway.recorder import Recorder, Refusing, sealed
from agl_runtime.gateway.registry import Registry
from agl_runtime.gateway.upstream import Reply, Upstream, read_chunk, refusal_for
from agl_runtime.schemas import Mode
from agl_runtime.store.base import Store

logger = logging.getLogger(__name__)
RETRY_MARK = "x-stainless-retry-count"
LONG_BYTES = 2**16  # of a request that takes the store more time than the event loop can be kept from others


@dataclass
class CallService:
    """Serves model calls; one for the whole gateway."""

    store: Store
    config: Config
    hold: Hold
    registry: Registry
    upstream: Upstream
    attempts: Attempts
    metrics: Metrics
    recorder: Recorder
    is_stopping: bool = False

    async def open(
        self, rollout_id: str, attempt_id: str, mode: Mode, dialect: Dialect, raw: bytes, headers: Mapping[str, str]
    ) -> Response:
        """Begin a call, or find the one that a marked retry repeats. Raises CallRefused."""
        body = load(raw)
        if named := dialect.named(body):
            body = dialect.completed(body, await self._recorded(rollout_id, attempt_id, named))
        request = dialect.parse(body)
        prepared = prepare(request, mode, self.config)
        with Refusing(attempt_id):
            attempt = await self.attempts.get(rollout_id, attempt_id)
        if attempt.is_closed:
            raise sealed(attempt_id)
        is_retry = headers.get(RETRY_MARK, "0") not in ("", "0")
        digest = hashlib.sha256(dialect.path.encode() + b"\0" + raw).hexdigest()
        key = attempt.retry_key(digest, is_retry=is_retry)
        if is_retry and (again := await self._again(attempt, dialect, request, key)) is not None:
            return again
        if attempt.is_closed:
            raise sealed(attempt_id)
        is_long = bool(named) or len(raw) > LONG_BYTES or attempt.is_resumed  # what is named may be of any length
        call = Call(attempt, mode, dialect, request, prepared, key, is_long=is_long)
        call.task = asyncio.create_task(self._run(call))
        attempt.running.add(call)
        return ExchangeResponse(call.exchange, self._reading(attempt, call.exchange, call))

    async def note_shed(self, rollout_id: str, attempt_id: str, refused: CallRefused) -> None:
        """A call that was refused unread is a failure of the infrastructure if its agent does not get past it."""
        with Refusing(attempt_id):
            attempt = await self.attempts.get(rollout_id, attempt_id)
        await self.recorder.note_failure(attempt, refused)

    async def _recorded(self, rollout_id: str, attempt_id: str, named: Iterable[str]) -> dict[str, Recorded]:
        """Request and answer of those calls of the attempt whose answers are named. Raises CallRefused."""
        with Refusing(attempt_id):
            attempt = await self.attempts.get(rollout_id, attempt_id)
            if attempt.is_closed:
                raise sealed(attempt_id)
            names = {attempt.answers[name]: name for name in named if name in attempt.answers}
            calls = await self.store.calls(rollout_id, attempt_id) if names else []
        found = ((names.get(call.info.call_id), call) for call in calls)
        return {name: (call.request, call.response) for name, call in found if name and call.response}

    async def _again(self, attempt: Attempt, dialect: Dialect, request: ModelRequest, key: str) -> Response | None:
        """The answer to a marked retry: of the call still running, or the recorded one; None where there is none."""
        stored = None
        if attempt.run_of(key) is None:
            with Refusing(attempt.attempt_id):
                stored = await self.store.find_retry(attempt.rollout_id, attempt.attempt_id, key)
        running = attempt.run_of(key)
        if running is not None:
            return ExchangeResponse(running.exchange, self._reading(attempt, running.exchange, running))
        if stored is None or not stored.response or stored.info.http_status != 200:
            return None
        self.metrics.replayed += 1
        exchange = Exchange()
        exchange.call_id = stored.info.call_id
        self._repeat(exchange, dialect, request, stored.response)
        return ExchangeResponse(exchange, self._reading(attempt, exchange, None))

    def _repeat(self, exchange: Exchange, dialect: Dialect, request: ModelRequest, response: Json) -> None:
        """Tell an answer that is whole already, in the way that the harness asked for."""
        if request.stream:
            exchange.write(dialect.replay(request, response))
            exchange.end()
        else:
            exchange.whole(200, response)

    @asynccontextmanager
    async def _reading(self, attempt: Attempt, exchange: Exchange, call: Call | None) -> AsyncIterator[Reading]:
        """What surrounds one reader: its delivery goes on record, and the last to leave early abandons the call."""
        reading = Reading()
        exchange.readers += 1
        with attempt.work():
            try:
                yield reading
            finally:
                exchange.readers -= 1
                if reading.delivered and exchange.call_id is not None:
                    await self.recorder.delivered(exchange.call_id)
                elif call is not None and not exchange.readers:
                    call.abandon()

    async def _run(self, call: Call) -> None:
        with call.attempt.work():
            try:
                call.allow_cancel()
                await self._serve(call)
            except CallRefused as refused:
                self._tell(call, refused)
            except asyncio.CancelledError:
                self._tell(call, sealed(call.attempt.attempt_id))
            except Exception:
                logger.exception("call %s of rollout %s failed in the gateway", call.call_id, call.attempt.rollout_id)
                self._tell(call, CallRefused("The gateway failed to serve or to record this call.", http_status=500))
            finally:
                call.attempt.running.discard(call)

    async def _serve(self, call: Call) -> None:
        try:
            await self.hold.admit(call.keep_alive)
        except CallRefused as refused:
            await self.recorder.note_failure(call.attempt, refused)
            raise
        with self.hold.flight():
            call.may_cancel = False
            call.started_at = time.monotonic()
            name = self.registry.resolve(call.request.model)
            self._classify(call)
            await self.recorder.intend(call)
            answer, response = await self._answer(call, name)
            await self.recorder.answer(call, answer, response)
        call.exchange.call_id = call.call_id
        if call.events is not None:
            call.exchange.write(b"".join(call.events.feed(chunk) for chunk in call.held) + call.events.end(answer))
            call.exchange.end()
        else:
            self._repeat(call.exchange, call.dialect, call.request, response)

    def _classify(self, call: Call) -> None:
        attempt, policy, asked = call.attempt, self.registry.policy, call.request.model
        meant = self.registry.meant(asked)
        call.is_auxiliary = is_auxiliary(asked, meant, policy=policy, has_asked_policy=attempt.has_asked_policy)
        attempt.has_asked_policy |= meant == policy

    async def _answer(self, call: Call, name: str) -> tuple[Answer, Json]:
        """The whole answer of the model server, also as the harness gets it; every other end is put on record here."""
        comes_whole = call.request.stream and not call.prepared.streams
        waiting = asyncio.create_task(_keep_alive(call)) if comes_whole else None
        try:
            call.allow_cancel()
            operation, keep_alive = call.request.operation, call.keep_alive
            body = partial(call.prepared.dump, sampled=call.attempt.sampled)
            async with self.upstream.send(name, call.attempt.rollout_id, operation, body, keep_alive) as reply:
                call.reply = reply
                if call.prepared.streams:
                    answer = await self._follow(call, reply)
                else:
                    answer = read_answer(await reply.json(), call.call_id)
                response = _tellable(call.dialect.render(call.request, _finished(answer)))
                forget_tokens(answer.response)
                call.assembler = None
                return answer, response
        except ServerFailed as error:
            call.may_cancel = False
            refused = refusal_for(error, call.dialect.stands_for)
            await self.recorder.failure(call, refused)
            call.exchange.call_id = call.call_id
            raise refused from error
        except asyncio.CancelledError:
            call.may_cancel = False
            if not self.is_stopping:
                await self.recorder.cut(call)
            raise
        finally:
            if waiting:
                waiting.cancel()
            call.may_cancel = False

    async def _follow(self, call: Call, reply: Reply) -> Answer:
        """Pass a stream on up to the chunk that finishes the answer; that one and what follows it are held back."""
        call.assembler = StreamAssembler(call.call_id, keeps_logprobs=call.request.wants_logprobs)
        call.events = call.dialect.stream(call.request)
        async for events in reply.events():
            out: list[bytes] = []
            try:
                for chunk in map(read_chunk, events):
                    call.assembler.feed(chunk)
                    if call.held or is_terminal(chunk):
                        call.held.append(chunk)
                    else:
                        out.append(call.events.feed(chunk))
            finally:
                call.exchange.write(b"".join(out))
        return read_answer(call.assembler.response())

    def _tell(self, call: Call, refused: CallRefused) -> None:
        """The error as the harness can take it: a response, or the last event of the stream that has begun."""
        self.metrics.refused[refused.http_status] += 1
        if call.exchange.status is None:
            call.exchange.whole(refused.http_status, call.dialect.error(refused), refused.headers())
        elif not call.exchange.ended:
            events = call.events or call.dialect.stream(call.request)
            call.exchange.write(events.fail(refused))
            call.exchange.end()


async def _keep_alive(call: Call) -> None:
    """For a harness that waits for a stream of an answer that comes whole: nothing else reaches it before the end."""
    while True:
        await asyncio.sleep(KEEP_ALIVE_S)
        call.keep_alive()


def load(raw: bytes) -> Json:
    """The request's JSON object. Raises CallRefused."""
    try:
        body = bodies.load(raw)
    except JSONDecodeError as error:
        raise CallRefused(f"The request's body cannot be read as JSON: {error.msg}.", http_status=400) from error
    if not isinstance(body, dict):
        raise CallRefused("The request's body must be a JSON object.", http_status=400)
    return body


def _finished(answer: Answer) -> Answer:
    if answer.finish_reason is None:
        raise ServerFailed("The model server ended its answer without finishing it.", status=200)
    return answer


def _tellable(response: Json) -> Json:
    if not bodies.is_tellable(response):
        raise ServerFailed("The model server's answer holds what cannot be told again.", status=200)
    return response
