"""A real gateway on a real port, in the test's own event loop, with a store in a temporary folder."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from agl_runtime.calls import RolloutCalls
from agl_runtime.client import GatewayClient
from agl_runtime.config import Config
from agl_runtime.gateway.__main__ import QuietServer, listen
from agl_runtime.gateway.app import create_app
from agl_runtime.gateway.auth import agent_key
from agl_runtime.gateway.state import Gateway
from agl_runtime.schemas import Model, RolloutCreate
from agl_runtime.store.base import Store, StoredCall
from agl_runtime.store.sqlite import open_store

ADMIN_KEY = "agl-admin-test"


def config(**sections: Any) -> Config:
    return Config.model_validate({"agent": {"command": "true"}, **sections})


@dataclass
class RunningGateway:
    """`http` carries the admin key."""

    url: str
    gateway: Gateway
    store: Store
    http: httpx.AsyncClient = field(repr=False)

    def register(self, endpoint: str, **fields: Any) -> None:
        self.gateway.set_models([Model(model="policy", endpoint=endpoint, **fields)])

    async def add(self, rollout_id: str = "r1", **fields: Any) -> None:
        await self.store.add_rollouts([RolloutCreate(input={"q": 1}, rollout_id=rollout_id, **fields)])

    def base(self, rollout_id: str = "r1", attempt_id: str = "0", mode: str = "train", api: str = "openai/v1") -> str:
        """What a client takes as its base URL; `api` is "anthropic" for Anthropic's."""
        return f"{self.url}/proxy/rollout/{rollout_id}/attempt/{attempt_id}/mode/{mode}/{api}"

    async def calls(self, rollout_id: str = "r1") -> list[StoredCall]:
        """The recorded calls once all that was going on is on record, deliveries too."""
        await self.gateway.attempts.close(rollout_id)
        return await self.store.calls(rollout_id)

    async def recorded(self, rollout_id: str = "r1") -> RolloutCalls:
        """The same as the trainer reads them."""
        await self.calls(rollout_id)
        async with GatewayClient(self.url, ADMIN_KEY) as reader:
            return await reader.calls(rollout_id)

    def key(self, rollout_id: str = "r1", attempt_id: str = "0", mode: Any = "train") -> str:
        return agent_key(ADMIN_KEY, rollout_id, attempt_id, mode)


@asynccontextmanager
async def running_gateway(
    folder: Path, settings: Config | None = None, *, port: int = 0
) -> AsyncIterator[RunningGateway]:
    store = open_store(folder / "store.sqlite3")
    app = create_app(settings or config(), store, ADMIN_KEY)
    listener = listen("127.0.0.1", port)
    # uvloop does this by itself; asyncio would let every answer wait for the client's acknowledgement of its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = QuietServer(uvicorn.Config(app, log_config=None, ws="none", lifespan="on", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve([listener]))
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http:
        await http.get("/healthz")
        try:
            yield RunningGateway(url, app.state.gateway, store, http)
        finally:
            app.state.gateway.stop()
            server.should_exit = True
            await serving
            listener.close()
            await store.close()
