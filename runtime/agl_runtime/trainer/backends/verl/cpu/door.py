"""Lets HTTP calls through to a server or refuses them, and can cut short those that are inside."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

from starlette.types import ASGIApp, Receive, Scope, Send

REFUSAL = b'{"error": {"message": "The weights of this server are changing.", "type": "server_error"}}'


class Door:
    """An ASGI application before `app`. `aborted` counts the calls that `abort` cut short."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._inside: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}
        self._lock = threading.Lock()  # a call is refused, or inside when `abort` looks
        self.asleep = False
        self.is_paused = False
        self.aborted = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = cast(asyncio.Task[Any], asyncio.current_task())
        if self._enters(task):
            try:
                await self._app(scope, receive, send)
            finally:
                with self._lock:
                    del self._inside[task]
            return
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": REFUSAL})

    def _enters(self, task: asyncio.Task[Any]) -> bool:
        with self._lock:
            if self.asleep or self.is_paused:
                return False
            self._inside[task] = asyncio.get_running_loop()
            return True

    @property
    def is_empty(self) -> bool:
        return not self._inside

    def abort(self) -> None:
        """Refuse calls until `is_paused` is taken back, and end those inside. From any thread."""
        with self._lock:
            self.is_paused = True
            for task, loop in self._inside.items():
                self.aborted += 1
                loop.call_soon_threadsafe(task.cancel)
