"""The controller's shell of I/O: claims rollouts, brings each to its end, keeps its leases, and reports.

Nothing is polled: a claim waits in the gateway until there is work, and an agent's end, a free place or a stop wakes
what waits for it. What a fact means is decided in `decide`. A rollout that another controller has taken over, or that
was deleted, is dropped with its agent. When the gateway stays silent past the client's patience, or refuses the key,
`run` raises. No agent outlives `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os

from agl_runtime.client import GatewayClient
from agl_runtime.controller.attempt import Attempts, HeldClock, Settings
from agl_runtime.controller.decide import Finish, Retry, follow_fault, free_slots, readable
from agl_runtime.controller.reward import RewardFunction
from agl_runtime.controller.runners.base import Runner
from agl_runtime.errors import ConflictError, GatewayError, KeyRefusedError, NotFoundError
from agl_runtime.schemas import ClaimRequest, Grant, LeaseRenewal, NextAttempt, PartStatus, RolloutState

log = logging.getLogger(__name__)

CLAIM_WAIT_S = 30.0
REPORT_S = 1.0
REPORT_PAUSE_S = 0.2
FINAL = (NotFoundError, ConflictError, KeyRefusedError)  # no other attempt can help


class Controller:
    def __init__(
        self, client: GatewayClient, runner: Runner, reward: RewardFunction | None, settings: Settings
    ) -> None:
        self._client = client
        self._settings = settings
        self._runner = runner
        self._held = HeldClock(self._renew)
        self._attempts = Attempts(client, runner, reward, self._held, settings)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()
        self._freed = asyncio.Event()
        self._changed = asyncio.Event()
        self._finished = 0
        self._failed = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. What runs then is killed, and is granted anew when this controller is started again.

        Raises GatewayError.
        """
        try:
            async with asyncio.TaskGroup() as group:
                duties = [group.create_task(each) for each in (self._claim(group), self._keep_leases(), self._report())]
                await stop.wait()
                for task in (*duties, *self._running.values()):
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _claim(self, group: asyncio.TaskGroup) -> None:
        while True:
            free = free_slots(self._settings.limit, len(self._running))
            if not free:
                self._freed.clear()
                await self._freed.wait()
                continue
            request = ClaimRequest(
                controller_id=self._settings.controller_id,
                held=sorted(self._running),
                limit=free,
                wait=CLAIM_WAIT_S,
                lease_s=self._settings.lease_s,
            )
            for grant in await self._client.claim(request):
                self._start(group, grant)

    def _start(self, group: asyncio.TaskGroup, grant: Grant) -> None:
        """A claim names what runs, so a grant is never of a rollout that runs already."""
        rollout_id = grant.rollout.rollout_id
        task = group.create_task(self._live(grant))
        self._running[rollout_id] = task
        self._changed.set()

        def ended(_: asyncio.Task[None]) -> None:
            del self._running[rollout_id]
            self._ending.discard(rollout_id)
            self._freed.set()
            self._changed.set()

        task.add_done_callback(ended)

    async def _live(self, grant: Grant) -> None:
        rollout_id = grant.rollout.rollout_id
        try:
            await self._bring_to_end(grant)
        except (NotFoundError, ConflictError) as error:
            log.info("rollout %s is ours no more: %s", rollout_id, error)
        except Exception as error:
            if isinstance(error, KeyRefusedError) or (isinstance(error, GatewayError) and error.status is None):
                raise
            log.exception("rollout %s", rollout_id)
            await self._finish(rollout_id, Finish(RolloutState.FAILED, f"The controller could not go on: {error}"))

    async def _try(self, grant: Grant, tries: int) -> Finish | Retry:
        """An unexpected fault, as of the disk or of the gateway's answer, fails this attempt only. Raises GatewayError
        when the rollout is ours no more, or the gateway is silent or refuses the key."""
        try:
            return await self._attempts.carry_out(grant, tries)
        except Exception as error:
            if isinstance(error, GatewayError) and (error.status is None or isinstance(error, FINAL)):
                raise
            log.exception("rollout %s, attempt %s", grant.rollout.rollout_id, grant.attempt_id)
            fault = f"The controller could not go on: {error}"
            return follow_fault(fault, tries, self._settings.attempts)

    async def _bring_to_end(self, grant: Grant) -> None:
        rollout_id = grant.rollout.rollout_id
        for tries in itertools.count(1):
            action = await self._try(grant, tries)
            if isinstance(action, Finish):
                return await self._finish(rollout_id, action)
            log.warning("rollout %s, attempt %s: %s", rollout_id, grant.attempt_id, action.reason)
            await asyncio.sleep(action.pause_s)
            request = NextAttempt(controller_id=self._settings.controller_id, after=grant.attempt_id)
            grant = await self._client.next_attempt(rollout_id, request)

    async def _finish(self, rollout_id: str, action: Finish) -> None:
        message = None if action.error_message is None else readable(action.error_message)
        self._ending.add(rollout_id)  # its lease ends with it, maybe before the answer to this is here
        await self._client.finish(rollout_id, action.state, message)
        self._finished += 1
        self._failed += action.state is RolloutState.FAILED
        log.info("rollout %s %s. %s", rollout_id, action.state, message or "")

    async def _keep_leases(self) -> None:
        while True:
            await self._renew()
            await asyncio.sleep(self._settings.lease_s / 3)

    async def _renew(self) -> None:
        renewal = LeaseRenewal(
            controller_id=self._settings.controller_id,
            rollout_ids=sorted(self._running),
            lease_s=self._settings.lease_s,
        )
        state = await self._client.renew(renewal)
        self._held.see(state.held_total_s, state.gateway)
        for rollout_id in state.lost:
            if (task := self._running.get(rollout_id)) and rollout_id not in self._ending:
                log.warning("rollout %s: its lease is lost, and its agent is ended", rollout_id)
                task.cancel()

    async def _report(self) -> None:
        while True:
            self._changed.clear()
            await self._say("running" if self._running else "idle")
            await asyncio.sleep(REPORT_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S):  # wait_for of Python 3.11 can miss that it was cancelled
                    await self._changed.wait()

    async def _say(self, state: str) -> None:
        detail = {
            "running": len(self._running),
            "finished": self._finished,
            "failed": self._failed,
            "limit": self._settings.limit,
            "isolation": self._runner.isolation,
            "starts": self._runner.starts,
        }
        waiting_for = "rollouts" if state == "idle" else None
        await self._client.report(
            PartStatus(part="controller", pid=os.getpid(), state=state, waiting_for=waiting_for, detail=detail)
        )
