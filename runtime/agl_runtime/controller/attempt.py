"""One attempt at a rollout: its agent run, its end posted and examined, its reward given, and what is to follow."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from agl_runtime.client import GatewayClient
from agl_runtime.controller.decide import Facts, Finish, Retry, Score, decide, time_left, unserved
from agl_runtime.controller.reward import RewardFunction
from agl_runtime.controller.runners.base import AgentRun, Runner
from agl_runtime.errors import ConfigError, GatewayError, RewardError, RunnerError
from agl_runtime.schemas import Grant

log = logging.getLogger(__name__)

TAIL_CHARS = 2000
NO_REWARD = "The agent ended without posting its reward."


class HeldClock:
    """Seconds that the gateway has held calls, summed over its restarts, which are counted too. `ask` renews the
    leases, which tells them."""

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        self.ask = ask
        self.total_s = 0.0
        self.restarts = 0
        self._last_s: float | None = None
        self._gateway: str | None = None

    def see(self, held_total_s: float, gateway: str) -> None:
        self.restarts += self._gateway not in (None, gateway)
        self._gateway = gateway
        if self._last_s is not None:
            self.total_s += held_total_s - self._last_s if held_total_s >= self._last_s else held_total_s
        self._last_s = held_total_s

    async def expire(self, timeout_s: float, expired: asyncio.Event) -> None:
        """Set `expired` when `timeout_s` is over, not counting what was held meanwhile (nor what was held between the
        last renewal and now, which is at most a third of a lease)."""
        began, held_s = time.monotonic(), self.total_s
        try:
            while (left_s := time_left(timeout_s, time.monotonic() - began, self.total_s - held_s)) > 0:
                await asyncio.sleep(left_s)
                await self.ask()
        except GatewayError as error:
            log.warning("a time limit is kept without the gateway's word: %s", error)
        expired.set()


@dataclass(frozen=True, slots=True)
class Settings:
    """`controller_id` stays the same when this controller is started again, so that it gets its rollouts back.
    `limit` is the most agents at once, `attempts` the most tries at one rollout."""

    controller_id: str
    limit: int
    attempts: int
    timeout_s: float
    reports_reward: bool = False
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Attempts:
    """`reward` is None where no function gives the reward; then the agent does, if `reports_reward` is set."""

    client: GatewayClient
    runner: Runner
    reward: RewardFunction | None
    held: HeldClock
    settings: Settings

    async def carry_out(self, grant: Grant, tries: int) -> Finish | Retry:
        """Run and judge one attempt. Raises GatewayError."""
        facts = Facts(
            tries=tries,
            max_tries=self.settings.attempts,
            timeout_s=min(self.settings.timeout_s, grant.rollout.config.timeout_seconds),
            wants_reward=self.settings.reports_reward or self.reward is not None,
        )
        restarts = self.held.restarts
        try:
            facts, run = await self._run_agent(grant, facts)
            if run is None:
                await self.client.seal(grant.rollout.rollout_id, grant.attempt_id)
            else:
                facts = await self._examine(grant, run, facts)
                if not run.exit.ok:
                    await self.held.ask()
                    facts = replace(facts, gateway_restarted=self.held.restarts > restarts)
            action = decide(facts)
            if isinstance(action, Score) and run is not None:
                action = decide(await self._score(grant, run, facts))
        finally:
            await self.runner.release(grant)
        if isinstance(action, Score):
            raise RewardError("A reward is due for an agent that has not run.", "Report this as a fault of agl.")
        return action

    async def _run_agent(self, grant: Grant, facts: Facts) -> tuple[Facts, AgentRun | None]:
        expired = asyncio.Event()
        timer = asyncio.create_task(self.held.expire(facts.timeout_s, expired))
        try:
            run = await self.runner.run(grant, expired)
        except (ConfigError, RunnerError) as error:
            return replace(facts, start_error=str(error), hopeless=isinstance(error, ConfigError)), None
        finally:
            timer.cancel()
        return replace(facts, exit=run.exit), run

    async def _examine(self, grant: Grant, run: AgentRun, facts: Facts) -> Facts:
        """Seal the attempt with how its agent ended, and read what the gateway recorded where that decides."""
        rollout_id = grant.rollout.rollout_id
        failures = await self.client.end_attempt(rollout_id, grant.attempt_id, exit_data(run, grant.agent_key))
        if run.exit.ok and not failures:
            return facts
        record = await self.client.calls(rollout_id)
        cause = unserved(failures, [call.info for call in record.calls], ended_well=run.exit.ok)
        return replace(facts, lost_calls=len(record.incomplete), unserved=cause)

    async def _score(self, grant: Grant, run: AgentRun, facts: Facts) -> Facts:
        rollout_id = grant.rollout.rollout_id
        if self.reward is None:
            posted = await self.client.events(rollout_id, event_type="reward")
            return replace(facts, has_reward=True) if posted else replace(facts, reward_error=NO_REWARD, hopeless=True)
        events = await self.client.events(rollout_id) if self.reward.wants_events else []
        try:
            reward = await self.reward.score(
                grant.rollout.input, run, [item.model_dump(mode="json") for item in events]
            )
        except (RewardError, RunnerError) as error:
            return replace(facts, reward_error=str(error))
        data: dict[str, Any] = {"value": reward.value, "source": "function"}
        if reward.parts:
            data["parts"] = reward.parts
        await self.client.add_event(rollout_id, grant.attempt_id, "reward", data)
        return replace(facts, has_reward=True)


def exit_data(run: AgentRun, agent_key: str) -> dict[str, Any]:
    """The data of an `agent_exit` event. The key is worthless by now; still it stands in no event."""
    outputs = {"stdout": run.stdout, "stderr": run.stderr}
    return {
        **asdict(run.exit),
        **{f"{name}_bytes": kept.size_bytes for name, kept in outputs.items()},
        **{f"{name}_tail": kept.text.replace(agent_key, "***")[-TAIL_CHARS:] for name, kept in outputs.items()},
    }
