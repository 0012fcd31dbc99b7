"""An OpenAI-compatible model server over real HTTP that says what a test scripts, with failure injection.

It answers chat/completions and completions, streamed and not, with token ids and log-probabilities in vLLM's places.
Ids are the UTF-8 bytes of a rendered conversation, so that a conversation's next prompt begins with the ids of its last
prompt and answer, as with a real template. It runs in its own thread: usable from synchronous and asynchronous tests.

    with FakeModelServer([Answer("hello"), Answer(status=500)]) as server:
        ... server.url, server.requests
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from aiohttp import web

MODEL = "policy"
Raw = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What one request is answered with. Ids and log-probabilities are right unless a field says otherwise.

    `ids` and `prompt_ids`: "right", "null", "absent", "empty" or "short" (one fewer than the usage says). `logprobs`:
    "right", "absent", "short" or "nan". `fault` breaks the transport: "drop" closes before any byte, "garbage" sends no
    JSON, "list" sends JSON that is no object, "empty" an object without choices, "cut" closes a stream after its first
    content. `status` other than 200 sends `error`. `gated` waits for `server.release()` before the first byte, and
    `gated_end` before the last chunk of a stream. `routes`: a whole answer tells its experts, see `routing`.
    """

    text: str = "ok"
    tool_calls: Sequence[Raw] = ()
    finish_reason: str = "stop"
    reasoning: str | None = None
    ids: Literal["right", "null", "absent", "empty", "short"] = "right"
    prompt_ids: Literal["right", "null", "absent", "empty", "short"] = "right"
    logprobs: Literal["right", "absent", "short", "nan"] = "right"
    versions: Sequence[Raw] | None = None
    routes: bool = False
    model: str | None = None
    status: int = 200
    error: Any = field(default_factory=lambda: {"error": {"message": "scripted failure", "type": "server_error"}})
    headers: dict[str, str] = field(default_factory=dict)
    fault: Literal["drop", "garbage", "list", "empty", "cut"] | None = None
    gated: bool = False
    gated_end: bool = False


@dataclass(frozen=True)
class Request:
    path: str
    body: Raw
    headers: dict[str, str]


Script = Sequence[Answer] | Callable[[Raw], Answer]


def tool_call(name: str, arguments: Raw, call_id: str = "call_1") -> Raw:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def render(messages: Sequence[Raw]) -> str:
    """The conversation as the fake's template writes it, with the generation prompt at its end."""
    return "".join(f"<{m.get('role')}>{_content(m)}</>" for m in messages) + "<assistant>"


def _content(message: Raw) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content) if content else ""
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    return text + "".join(f"<call>{function.get('name')} {function.get('arguments')}" for function in functions)


def encode(text: str) -> list[int]:
    return list(text.encode(errors="replace"))


class FakeModelServer:
    """`script` is a list of answers, used up in order and then repeated at its last, or a function of the body."""

    def __init__(self, script: Script = (Answer(),), *, model: str = MODEL, port: int = 0) -> None:
        self.script = script
        self.model = model
        self.requests: list[Request] = []
        self.cancelled = 0
        self.can_tokenize = True
        self.port = port
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> FakeModelServer:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        if not self._started.wait(10):
            raise RuntimeError("the fake model server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread is not None:
            self._thread.join(10)

    def release(self) -> None:
        """Let everything that is gated, now and later, go on."""
        self._loop.call_soon_threadsafe(self._gate.set)

    def wait_for(self, predicate: Callable[[FakeModelServer], bool], timeout_s: float = 20.0) -> None:
        """Block until `predicate(server)` holds; use `asyncio.to_thread` in an asynchronous test."""
        with self._changed:
            if not self._changed.wait_for(lambda: predicate(self), timeout_s):
                raise TimeoutError("the model server did not see what the test waits for")

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._gate = asyncio.Event()
        runner = self._loop.run_until_complete(self._start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_post("/v1/{kind:chat/completions|completions}", self._handle)
        app.router.add_post("/tokenize", self._tokenize)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = runner.addresses[0][1]
        return runner

    def _note(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    def _next(self, body: Raw) -> Answer:
        if callable(self.script):
            return self.script(body)
        return self.script[min(len(self.requests), len(self.script)) - 1]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        kind = request.match_info["kind"]
        self._note(lambda: self.requests.append(Request(kind, body, dict(request.headers))))
        answer = self._next(body)
        try:
            if answer.gated:
                await self._gate.wait()
            return await self._answer(request, kind, body, answer)
        except asyncio.CancelledError:
            self._note(self._count_cancelled)
            raise
        except ConnectionResetError:  # the same, noticed in writing
            self._note(self._count_cancelled)
            return web.Response()

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        """As vLLM's; a server without it answers 404. Not one of `requests`."""
        if not self.can_tokenize:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json()
        return web.json_response({"count": len(encode(render(body["messages"]))), "max_model_len": 4096})

    def _count_cancelled(self) -> None:
        self.cancelled += 1

    async def _answer(self, request: web.Request, kind: str, body: Raw, answer: Answer) -> web.StreamResponse:
        if answer.fault == "drop":
            return _close(request, web.Response())
        if answer.status != 200:
            return web.json_response(answer.error, status=answer.status, headers=answer.headers)
        if answer.fault in ("garbage", "list", "empty"):
            text = {"garbage": "<html>busy</html>", "list": "[1]", "empty": "{}"}[answer.fault]
            return web.Response(text=text, content_type="application/json")
        try:
            whole = whole_answer(kind, body, answer, self.model)
        except (AttributeError, TypeError, ValueError) as error:
            refusal = {"error": {"message": f"The body cannot be read: {error}.", "type": "BadRequestError"}}
            return web.json_response(refusal, status=400)
        if body.get("stream"):
            return await self._stream(request, kind, body, answer, whole)
        return web.Response(text=json.dumps(whole), content_type="application/json")

    async def _stream(
        self, request: web.Request, kind: str, body: Raw, answer: Answer, whole: Raw
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chunks = list(chat_chunks(whole) if kind == "chat/completions" else text_chunks(whole))
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**_head(whole), "choices": [], "usage": whole["usage"]})
        for number, chunk in enumerate(chunks):
            if answer.fault == "cut" and number == 2:
                return _close(request, response)
            if answer.gated_end and chunk["choices"] and chunk["choices"][0]["finish_reason"]:
                await self._gate.wait()
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def _close(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return response


def whole_answer(kind: str, body: Raw, answer: Answer, model: str) -> Raw:
    chat = kind == "chat/completions"
    prompt = encode(render(body.get("messages") or []) if chat else str(body.get("prompt")))
    spoken = {"role": "assistant", "content": answer.text, "tool_calls": list(answer.tool_calls)}
    sampled = encode(_content(spoken) + "</>") if answer.text or answer.tool_calls else []
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(sampled),
        "total_tokens": len(prompt) + len(sampled),
    }
    choice: Raw = {"index": 0, "finish_reason": answer.finish_reason, "logprobs": None}
    if chat:
        choice["message"] = {"role": "assistant", "content": answer.text or None}
        if answer.reasoning is not None:
            choice["message"]["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            choice["message"]["tool_calls"] = list(answer.tool_calls)
            choice["finish_reason"] = "tool_calls" if answer.finish_reason == "stop" else answer.finish_reason
    else:
        choice["text"] = answer.text
    whole: Raw = {"id": "cmpl-1", "object": "chat.completion" if chat else "text_completion", "created": 1}
    whole |= {"model": answer.model or model, "choices": [choice], "usage": usage}
    if body.get("return_token_ids"):
        _put(whole if chat else choice, "prompt_token_ids", prompt, answer.prompt_ids)
        _put(choice, "token_ids", sampled, answer.ids)
    if body.get("logprobs") not in (None, False) and answer.logprobs != "absent":
        choice["logprobs"] = _logprobs(sampled, answer.logprobs, chat)
    if answer.versions is not None:
        choice["weight_versions"] = list(answer.versions)
    if answer.routes and not body.get("stream"):
        file = io.BytesIO()
        np.save(file, routing([*prompt, *sampled]))
        choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    count = body.get("n") or 1
    count = min(max(count, 1), 8) if isinstance(count, int) else 1  # a real one refuses what it does not take
    whole["choices"] = [{**choice, "index": index} for index in range(count)]
    return whole


def routing(ids: Sequence[int]) -> Any:
    """The experts of all tokens but the last: in the first of two layers the token, in the second its place."""
    return np.stack([np.array(ids), np.arange(len(ids))], 1).astype(np.uint16)[:-1, :, None]


def _put(place: Raw, key: str, ids: list[int], how: str) -> None:
    if how != "absent":
        place[key] = {"right": ids, "null": None, "empty": [], "short": ids[:-1]}[how]


def _logprobs(sampled: list[int], how: str, chat: bool) -> Raw:
    values = [-(1 + i % 7) / 8 for i in range(len(sampled))]
    if how == "short":
        values = values[:-1]
    if how == "nan" and values:
        values[0] = float("nan")
    if chat:
        return {
            "content": [
                {"token": chr(t), "logprob": v, "top_logprobs": []} for t, v in zip(sampled, values, strict=False)
            ]
        }
    return {"tokens": [chr(t) for t in sampled], "token_logprobs": values, "text_offset": [], "top_logprobs": None}


def _head(whole: Raw) -> Raw:
    names = {"chat.completion": "chat.completion.chunk"}
    return {
        "id": whole["id"],
        "object": names.get(whole["object"], whole["object"]),
        "created": 1,
        "model": whole["model"],
    }


def chat_chunks(whole: Raw) -> Iterator[Raw]:
    """Role and prompt ids first, then every piece of text with its ids, then a delta of {} that carries the last id."""
    first = {**_head(whole), "choices": [_delta(0, {"role": "assistant", "content": ""})]}
    if "prompt_token_ids" in whole:
        first["prompt_token_ids"] = whole["prompt_token_ids"]
    yield first
    for choice in whole["choices"]:
        deltas = list(_deltas(choice["message"])) or [{}]
        cuts = _split(len(choice.get("token_ids") or []), len(deltas) + 1)
        log_cuts = _split(len((choice["logprobs"] or {}).get("content") or []), len(deltas) + 1)
        for number, delta in enumerate([*deltas, {}]):
            piece = _delta(choice["index"], delta)
            if "token_ids" in choice:
                ids = choice["token_ids"]
                piece["token_ids"] = ids[cuts[number] : cuts[number + 1]] if ids is not None else None
            if choice["logprobs"]:
                piece["logprobs"] = {"content": choice["logprobs"]["content"][log_cuts[number] : log_cuts[number + 1]]}
            if number == len(deltas):
                piece["finish_reason"] = choice["finish_reason"]
                piece |= {"weight_versions": choice["weight_versions"]} if "weight_versions" in choice else {}
            yield {**_head(whole), "choices": [piece]}


def _delta(index: int, delta: Raw) -> Raw:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _deltas(message: Raw) -> Iterator[Raw]:
    if message.get("reasoning_content"):
        yield {"reasoning_content": message["reasoning_content"]}
    text = message["content"] or ""
    for start in range(0, len(text), 4):
        yield {"content": text[start : start + 4]}
    for index, call in enumerate(message.get("tool_calls") or []):
        arguments = call["function"]["arguments"]
        yield {
            "tool_calls": [{"index": index, **call, "function": {"name": call["function"]["name"], "arguments": ""}}]
        }
        for part in (arguments[:5], arguments[5:]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}


def _split(count: int, parts: int) -> list[int]:
    """Cuts of `count` items into `parts` pieces, of which the last gets at least one item where there is any."""
    rest = max(count - 1, 0)
    return [rest * i // (parts - 1) for i in range(parts)] + [count]


def text_chunks(whole: Raw) -> Iterator[Raw]:
    for choice in whole["choices"]:
        ids, text = choice.get("token_ids"), choice["text"]
        values = (choice["logprobs"] or {}).get("token_logprobs") or []
        half, id_half, value_half = len(text) // 2, len(ids or []) // 2, len(values) // 2
        parts = (
            (text[:half], slice(0, id_half), slice(0, value_half)),
            (text[half:], slice(id_half, None), slice(value_half, None)),
        )
        for number, (piece, of_ids, of_values) in enumerate(parts):
            out: Raw = {"index": choice["index"], "text": piece, "logprobs": None, "finish_reason": None}
            if number == 0 and "prompt_token_ids" in choice:
                out["prompt_token_ids"] = choice["prompt_token_ids"]
            if "token_ids" in choice:
                out["token_ids"] = ids[of_ids] if ids is not None else None
            if choice["logprobs"]:
                out["logprobs"] = {
                    "tokens": [],
                    "token_logprobs": values[of_values],
                    "text_offset": [],
                    "top_logprobs": None,
                }
            if number == 1:
                out["finish_reason"] = choice["finish_reason"]
                out |= {"weight_versions": choice["weight_versions"]} if "weight_versions" in choice else {}
            yield {**_head(whole), "choices": [out]}
