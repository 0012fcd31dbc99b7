"""Lets HTTP calls through to a server or refuses them, and can cut short those that are inside."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

REFUSAL = b'{"error": {"message": "The weights of this server are changing.", "type": "server_error"}}'


class Door:
    """An ASGI application before `app`. `aborted` counts the calls that `abort` cut short."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._inside: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}
        self.asleep = False
        self.is_paused = False
        self.aborted = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (self.asleep or self.is_paused):
            task = asyncio.current_task()
            if task is not None:
                self._inside[task] = asyncio.get_running_loop()
            try:
                await self._app(scope, receive, send)
            finally:
                if task is not None:
                    del self._inside[task]
            return
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": REFUSAL})

    def abort(self) -> None:
        """Refuse calls until `is_paused` is taken back, and end those inside. From any thread."""
        self.is_paused = True
        for task, loop in list(self._inside.items()):
            self.aborted += 1
            loop.call_soon_threadsafe(task.cancel)
