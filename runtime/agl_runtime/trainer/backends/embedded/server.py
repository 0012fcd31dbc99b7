"""The model server: OpenAI's chat and text completions over HTTP on loopback, in a thread of its own.

Its event loop is not the trainer's, so answers keep flowing while the trainer computes, and the trainer's loop is never
held up by a crowd of agents. Requests are read in a worker thread, so that a long prompt holds up nobody else's answer.
A client that goes away cancels its generations, and what it still waits to have read is not read.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import orjson
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import ASGIApp

from agl_runtime.errors import TrainerError
from agl_runtime.trainer.backends.embedded.answers import AnswerWriter, ChatWriter, CompletionWriter, Json
from agl_runtime.trainer.backends.embedded.choices import Choice
from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.engine import Engine, set_signals
from agl_runtime.trainer.backends.embedded.generation import Signal
from agl_runtime.trainer.backends.embedded.refusal import RequestRefused
from agl_runtime.trainer.backends.embedded.requests import Limits, Order, read_chat, read_completion, read_prompt

Reader = Callable[[Any, Codec, Limits], Order]
_BACKLOG = 2048
_CLIENT_CLOSED = 499
_KEEP_ALIVE_S = 600  # longer than clients keep idle connections, so that none is closed just as it is used again
_SHUTDOWN_S = 2


def create_app(engine: Engine, codec: Codec, limits: Limits, key: str) -> FastAPI:
    """The engine must run and set its signals on the event loop that serves this app. Who has no `key` gets nothing:
    an agent on this machine that finds the port must not go past the gateway."""
    door = [Depends(partial(_check_key, key))]
    app = FastAPI(title="agl embedded model server", docs_url=None, redoc_url=None, openapi_url=None, dependencies=door)
    # One at a time: encoding changes a tokenizer's state, and two would only share the processor with what samples.
    reading = asyncio.Lock()

    @app.exception_handler(RequestRefused)
    async def refused(_: Request, error: RequestRefused) -> Response:
        return _json(error.body(), error.status)

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok", "version": str(engine.version)})

    @app.get("/v1/models")
    async def models() -> Response:
        served = {"id": limits.model, "object": "model", "created": 0, "owned_by": "agl"}
        return _json({"object": "list", "data": [{**served, "max_model_len": limits.context}]})

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _serve(request, read_chat, ChatWriter)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _serve(request, read_completion, CompletionWriter)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """As vLLM's, for a chat body."""
        raw = await request.body()
        async with reading:
            ids = await asyncio.to_thread(lambda: read_prompt(_body(raw), codec, limits))
        return _json({"count": len(ids), "max_model_len": limits.context, "tokens": ids})

    async def _serve(request: Request, read: Reader, writer: type[AnswerWriter]) -> Response:
        raw = await request.body()
        async with reading:
            if await request.is_disconnected():
                return Response(status_code=_CLIENT_CLOSED)
            order = await asyncio.to_thread(lambda: read(_body(raw), codec, limits))
        if await request.is_disconnected():
            return Response(status_code=_CLIENT_CLOSED)
        answer = writer(codec, order, limits.model)
        if order.stream:
            return StreamingResponse(_stream(engine, codec, order, answer), media_type="text/event-stream")
        return await _answer(request, engine, codec, order, answer)

    return app


async def _check_key(key: str, request: Request) -> None:
    offered = request.headers.get("authorization", "")
    if not secrets.compare_digest(offered.encode(), f"Bearer {key}".encode()):
        raise RequestRefused(
            "The key is missing or wrong.", "Call through the gateway.", code="invalid_api_key", status=401
        )


def _json(content: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _body(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"The request's body is not JSON: {error}.") from error


@asynccontextmanager
async def _generating(engine: Engine, codec: Codec, order: Order) -> AsyncIterator[tuple[list[Choice], asyncio.Event]]:
    """The order's choices being generated; whatever is unfinished when the block is left is cancelled."""
    changed = asyncio.Event()
    choices = [Choice(codec, order, index, changed) for index in range(len(order.prompts) * order.n)]
    for choice in choices:
        engine.submit(choice.generation)
    try:
        yield choices, changed
    finally:
        for choice in choices:
            choice.generation.cancelled = True


async def _answer(request: Request, engine: Engine, codec: Codec, order: Order, writer: AnswerWriter) -> Response:
    async with _generating(engine, codec, order) as (choices, changed):
        # The body has been read, so the next message can only be that the client is gone.
        gone = asyncio.ensure_future(request.receive())
        gone.add_done_callback(lambda _: changed.set())
        try:
            while any(choice.generation.finish is None for choice in choices):
                await changed.wait()
                changed.clear()
                if gone.done():
                    return Response(status_code=_CLIENT_CLOSED)
        finally:
            gone.cancel()
        if any(choice.generation.finish == "error" for choice in choices):
            raise _engine_failed()
        read = [(choice, news) for choice in choices if (news := choice.read())]
        return _json(writer.whole(read))


async def _stream(engine: Engine, codec: Codec, order: Order, writer: AnswerWriter) -> AsyncIterator[bytes]:
    async with _generating(engine, codec, order) as (choices, changed):
        for choice in choices:
            yield _event(writer.opening(choice))
        while not all(choice.ended for choice in choices):
            await changed.wait()
            changed.clear()
            for choice in choices:
                if choice.generation.finish == "error":
                    yield _event(_engine_failed().body())
                    return
                if news := choice.read():
                    yield _event(writer.chunk(choice, news))
        if order.usage_chunk:
            yield _event(writer.usage_chunk(choices))
        yield b"data: [DONE]\n\n"


def _event(content: Json) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _engine_failed() -> RequestRefused:
    return RequestRefused(
        "The model server failed or was stopped while it sampled.", "Look at the trainer's log.", status=500
    )


class ServerThread:
    """Serves one app on a free loopback port, on an event loop in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def notify(self, signals: list[Signal]) -> None:
        """Set `signals` on the server's event loop. From any thread."""
        self._loop.call_soon_threadsafe(set_signals, signals)

    def start(self, app: ASGIApp) -> str:
        """Serve `app`, at the address returned. Raises TrainerError when no port can be had."""
        try:
            listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        except OSError as error:
            raise TrainerError(f"The model server found no port: {error.strerror}.", "Free a loopback port.") from error
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        self._server = uvicorn.Server(config)
        serve = self._server.serve(sockets=[listener])
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(serve,), name="model-server", daemon=True
        )
        self._thread.start()
        host, port = listener.getsockname()
        return f"http://{host}:{port}"

    def stop(self) -> None:
        """Close connections, which cancels what they wait for, and end the thread."""
        if self._server and self._thread:
            self._server.should_exit = True
            self._thread.join()

    def close(self) -> None:
        """After `stop`, and when nothing notifies any more."""
        self._loop.close()
