"""Typed HTTP client of the gateway's control API, for the controller, the trainer and the command line.

Its retries live here and nowhere else: a call that did not reach the gateway, or met a 502, 503 or 504, is repeated
with growing pauses until `patience_s` has passed. Every repeated call is idempotent: rollouts carry ids, a claim names
what is held already, sealing and ending twice are harmless, and an event carries an `event_id`.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import aiohttp
import orjson
from pydantic import TypeAdapter

from agl_runtime import calls
from agl_runtime.errors import ConflictError, GatewayError, KeyRefusedError, NotFoundError
from agl_runtime.schemas import (
    Change,
    CheckpointRecord,
    ClaimRequest,
    Event,
    Grant,
    LeaseRenewal,
    LeaseState,
    Model,
    NextAttempt,
    PartStatus,
    PauseRequest,
    ProxyState,
    Rollout,
    RolloutCreate,
    RolloutDetail,
    RolloutPatch,
    RolloutState,
    RolloutStatusPatch,
    TerminalPage,
)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 3.0
RETRIED_STATUSES = frozenset({502, 503, 504})
SPOKEN = {401: KeyRefusedError, 403: KeyRefusedError, 404: NotFoundError, 409: ConflictError}
"""Statuses whose detail is a whole message: what is wrong and what to do."""
_ROLLOUTS = TypeAdapter(list[Rollout])
_EVENTS = TypeAdapter(list[Event])
_GRANTS = TypeAdapter(list[Grant])
_PARTS = TypeAdapter(list[PartStatus])
_CHECKPOINTS = TypeAdapter(list[CheckpointRecord])


class GatewayClient:
    """`url` is the gateway's root, `key` its admin key. Use it as an async context manager."""

    def __init__(self, url: str, key: str, *, patience_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"}
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> GatewayClient:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # rollouts

    async def add_rollouts(self, items: Sequence[RolloutCreate]) -> list[Rollout]:
        """Enqueue. Items without an id get one here, so that a repeated call enqueues nothing twice."""
        named = [item.model_copy(update={"rollout_id": item.rollout_id or uuid.uuid4().hex}) for item in items]
        body = [item.model_dump(mode="json", exclude_none=True) for item in named]
        return _ROLLOUTS.validate_json(await self._call("POST", "/api/rollouts", body))

    async def rollout(self, rollout_id: str) -> RolloutDetail:
        return RolloutDetail.model_validate_json(await self._call("GET", f"/api/rollouts/{rollout_id}"))

    async def rollouts(self, states: Sequence[RolloutState] = tuple(RolloutState), limit: int = 500) -> list[Rollout]:
        query = [("state_in", state.value) for state in states] + [("limit", str(limit))]
        return _ROLLOUTS.validate_json(await self._call("GET", "/api/rollouts", query=query))

    async def terminal(self, after: int, *, limit: int = 1000, wait_s: float = 0.0) -> TerminalPage:
        """The page after the cursor; waits up to `wait_s` for its first item."""
        query = [("after", str(after)), ("limit", str(limit)), ("wait", str(wait_s))]
        return TerminalPage.model_validate_json(await self._call("GET", "/api/rollouts/terminal", query=query))

    async def finish(self, rollout_id: str, state: RolloutState, error_message: str | None = None) -> None:
        """End a rollout; one that has ended in the same state already is left as it is."""
        status = RolloutStatusPatch(state=state, error_message=error_message)
        body = RolloutPatch(status=status).model_dump(mode="json", exclude_none=True)
        try:
            await self._call("PATCH", f"/api/rollouts/{rollout_id}", body)
        except ConflictError:
            if (await self.rollout(rollout_id)).rollout.status.state is not state:
                raise

    # leases and attempts

    async def claim(self, request: ClaimRequest) -> list[Grant]:
        return _GRANTS.validate_json(await self._call("POST", "/api/claims", request.model_dump(mode="json")))

    async def renew(self, renewal: LeaseRenewal) -> LeaseState:
        body = renewal.model_dump(mode="json")
        return LeaseState.model_validate_json(await self._call("POST", "/api/claims/renew", body))

    async def next_attempt(self, rollout_id: str, request: NextAttempt) -> Grant:
        body = request.model_dump(mode="json")
        return Grant.model_validate_json(await self._call("POST", f"/api/rollouts/{rollout_id}/attempt", body))

    async def seal(self, rollout_id: str, attempt_id: str) -> None:
        await self._call("POST", f"/api/rollouts/{rollout_id}/attempt/{attempt_id}/seal")

    async def end_attempt(self, rollout_id: str, attempt_id: str, exit_data: Mapping[str, Any]) -> list[Event]:
        """Seal it and add its `agent_exit`; returns its `upstream_failure` events."""
        body = {"event_type": "agent_exit", "data": dict(exit_data), "event_id": uuid.uuid4().hex}
        return _EVENTS.validate_json(
            await self._call("POST", f"/api/rollouts/{rollout_id}/attempt/{attempt_id}/end", body)
        )

    # events and calls

    async def add_event(self, rollout_id: str, attempt_id: str, event_type: str, data: Mapping[str, Any]) -> None:
        body = {"event_type": event_type, "data": dict(data), "event_id": uuid.uuid4().hex}
        await self._call("POST", f"/api/rollouts/{rollout_id}/attempt/{attempt_id}/events", body)

    async def events(self, rollout_id: str, *, event_type: str | None = None) -> list[Event]:
        """Of the last attempt; model calls appear as `model_request` events, as in v1.0."""
        query = [("event_type", event_type)] if event_type else []
        return _EVENTS.validate_json(await self._call("GET", f"/api/rollouts/{rollout_id}/events", query=query))

    async def calls(self, rollout_id: str) -> calls.RolloutCalls:
        """The last attempt's calls in the compact binary form, and the reward."""
        return calls.decode(await self._call("GET", f"/api/rollouts/{rollout_id}/calls"))

    # the policy

    async def register_model(self, model: Model) -> None:
        key = {"api_key": model.api_key.get_secret_value()} if model.api_key else {}
        await self._call("POST", "/api/models", [{**model.model_dump(mode="json"), **key}])

    async def clear_models(self) -> None:
        await self._call("DELETE", "/api/models")

    async def pause(self, reason: str) -> ProxyState:
        body = PauseRequest(reason=reason).model_dump(mode="json")
        return ProxyState.model_validate_json(await self._call("POST", "/proxy/pause", body))

    async def resume(self) -> ProxyState:
        return ProxyState.model_validate_json(await self._call("POST", "/proxy/resume"))

    async def proxy_state(self, *, drained_wait_s: float = 0.0) -> ProxyState:
        """Waits up to `drained_wait_s` for `inflight` to reach zero."""
        query = [("drained_wait", str(drained_wait_s))]
        return ProxyState.model_validate_json(await self._call("GET", "/proxy/state", query=query))

    async def record_checkpoint(self, record: CheckpointRecord) -> None:
        await self._call("POST", "/api/checkpoints", record.model_dump(mode="json"))

    async def checkpoints(self) -> list[CheckpointRecord]:
        return _CHECKPOINTS.validate_json(await self._call("GET", "/api/checkpoints"))

    # what runs

    async def report(self, status: PartStatus) -> None:
        await self._call("POST", "/api/parts", status.model_dump(mode="json"))

    async def parts(self) -> list[PartStatus]:
        return _PARTS.validate_json(await self._call("GET", "/api/parts"))

    async def counts(self) -> dict[str, int]:
        """Rollouts by state and calls by reason."""
        return dict(orjson.loads(await self._call("GET", "/api/counts")))

    async def changes(self, after: int = 0) -> AsyncIterator[Change]:
        """The server-sent change stream; ends when the gateway does."""
        async with self._open().get(f"{self.url}/api/changes", params={"after": str(after)}) as response:
            await _raise_for(response)
            async for line in response.content:
                if line.startswith(b"data:"):
                    yield Change.model_validate_json(line[5:])

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise GatewayError("The gateway client is not open.", "Use it within `async with`.")
        return self._session

    async def _call(
        self, method: str, path: str, body: object = None, *, query: Sequence[tuple[str, str]] = ()
    ) -> bytes:
        data = orjson.dumps(body) if body is not None else None
        headers = {"Content-Type": "application/json"} if data is not None else {}
        give_up_at = time.monotonic() + self._patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with self._open().request(
                    method, self.url + path, data=data, params=list(query), headers=headers
                ) as response:
                    if response.status not in RETRIED_STATUSES or time.monotonic() > give_up_at:
                        await _raise_for(response)
                        return await response.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > give_up_at:
                    raise GatewayError(
                        f"The gateway at {self.url} does not answer ({type(error).__name__}).",
                        "Look at `agl status` and `agl logs gateway`.",
                    ) from error
            await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


async def _raise_for(response: aiohttp.ClientResponse) -> None:
    if response.status < 400:
        return
    try:
        detail = str(orjson.loads(await response.read())["detail"]).rstrip(".")
    except (orjson.JSONDecodeError, TypeError, KeyError):
        detail = "no detail"
    if response.status in SPOKEN:
        raise SPOKEN[response.status](f"{detail}.", status=response.status)
    what = f"The gateway answered {response.status} to {response.method} {response.url.path}: {detail}."
    raise GatewayError(what, "Look at `agl logs gateway`.", status=response.status)
