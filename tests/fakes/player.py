"""A controller without processes: it claims rollouts over HTTP and plays their agents itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import httpx

from agl_runtime.client import GatewayClient
from agl_runtime.schemas import ClaimRequest, Grant, NextAttempt, Rollout, RolloutState

NAME = "player"


def even_fails(rollout: Rollout) -> float:
    """The rollouts of a group get rewards 0, 1, 0, 1, ..."""
    return float((rollout.metadata.model_extra or {})["index"] % 2)


async def go_on(rollout: Rollout) -> None:
    """Without a pause."""


@dataclass
class Player:
    """Each agent makes `calls` model calls, each going on from the last. A call that fails begins another attempt;
    `reward` None ends the rollout in an infrastructure failure. `pause` is awaited between two calls."""

    url: str
    admin_key: str
    reward: Callable[[Rollout], float | None] = even_fails
    calls: int = 2
    pause: Callable[[Rollout], Awaitable[None]] = go_on
    played: list[str] = field(default_factory=list)

    async def run(self) -> None:
        async with GatewayClient(self.url, self.admin_key) as client, httpx.AsyncClient(timeout=60) as http:
            while True:
                grants = await client.claim(ClaimRequest(controller_id=NAME, limit=8, wait=5.0))
                await asyncio.gather(*(self._play(client, http, grant) for grant in grants))

    async def _play(self, client: GatewayClient, http: httpx.AsyncClient, grant: Grant) -> None:
        self.played.append(grant.rollout.rollout_id)
        while not await self._talk(http, grant):
            again = NextAttempt(controller_id=NAME, after=grant.attempt_id)
            grant = await client.next_attempt(grant.rollout.rollout_id, again)
        await self._close(client, grant.rollout, grant.attempt_id)

    async def _talk(self, http: httpx.AsyncClient, grant: Grant) -> bool:
        """Whether every call was answered."""
        rollout = grant.rollout
        path = f"/proxy/rollout/{rollout.rollout_id}/attempt/{grant.attempt_id}/mode/{rollout.mode}/openai/v1"
        messages = [{"role": "user", "content": f"question {rollout.input['q']}"}]
        for turn in range(self.calls):
            if turn:
                await self.pause(rollout)
            answer = await http.post(
                f"{self.url}{path}/chat/completions",
                json={"model": "policy", "messages": messages, "max_tokens": 8},
                headers={"Authorization": f"Bearer {grant.agent_key}"},
            )
            if answer.status_code != 200:
                return False
            said = answer.json()["choices"][0]["message"]["content"] or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        return True

    async def _close(self, client: GatewayClient, rollout: Rollout, attempt: str) -> None:
        await client.seal(rollout.rollout_id, attempt)
        used = {"exit_code": 0, "cpu_s": 0.5, "max_rss_mb": 64.0}
        await client.add_event(rollout.rollout_id, attempt, "agent_exit", used)
        reward = self.reward(rollout)
        if reward is None:
            await client.finish(rollout.rollout_id, RolloutState.FAILED, "The reward function raised.")
            return
        await client.add_event(rollout.rollout_id, attempt, "reward", {"value": reward, "source": "function"})
        await client.finish(rollout.rollout_id, RolloutState.SUCCEEDED)


@contextlib.asynccontextmanager
async def playing(player: Player) -> AsyncIterator[Player]:
    """The player at work; what it raises ends the test."""
    task = asyncio.create_task(player.run())
    try:
        yield player
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
