"""The controller's loop over a fake gateway and a fake runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from agl_runtime.calls import CallInfo
from agl_runtime.client import GatewayClient
from agl_runtime.controller import decide, loop
from agl_runtime.controller.attempt import Settings
from agl_runtime.controller.loop import Controller
from agl_runtime.controller.reward import Reward, RewardFunction
from agl_runtime.controller.runners.base import AgentRun
from agl_runtime.errors import ConfigError, ConflictError, GatewayError, NotFoundError, RewardError, RunnerError
from agl_runtime.schemas import Event, Grant, RolloutState
from fakes.claims import FakeClaims, granted
from fakes.runner import FakeRunner, ran

SETTINGS = Settings(controller_id="c", limit=2, attempts=3, timeout_s=600.0)


@dataclass
class FakeReward:
    """`give` returns the reward or raises."""

    give: Callable[[], Reward] = lambda: Reward(0.5, {})
    wants_events: bool = False
    events: list[Any] = field(default_factory=list)

    async def score(self, task: Any, run: AgentRun, events: list[Any]) -> Reward:
        self.events = events
        return self.give()


@pytest.fixture(autouse=True)
def _no_pause_before_another_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "FIRST_PAUSE_S", 0.0)


@asynccontextmanager
async def controlled(
    claims: FakeClaims, runner: FakeRunner, reward: FakeReward | None = None, settings: Settings = SETTINGS
) -> AsyncIterator[asyncio.Task[None]]:
    stop = asyncio.Event()
    controller = Controller(cast(GatewayClient, claims), runner, cast("RewardFunction | None", reward), settings)
    running = asyncio.create_task(controller.run(stop))
    try:
        yield running
    finally:
        stop.set()
        await asyncio.wait([running])


async def outcome(
    runner: FakeRunner, reward: FakeReward | None = None, claims: FakeClaims | None = None, **settings: Any
) -> tuple[RolloutState, str | None]:
    """Of one rollout."""
    claims = claims or FakeClaims()
    async with controlled(claims, runner, reward, replace(SETTINGS, **settings)):
        await claims.add(granted())
        await claims.until(lambda: bool(claims.states))
    return claims.states["r1"]


async def test_an_attempt_is_sealed_posted_judged_and_ended_in_this_order() -> None:
    claims, reward = FakeClaims(), FakeReward(lambda: Reward(0.5, {"style": 1.0}))
    runner = FakeRunner(lambda grant: ran(stdout="my key is agent-key"))
    assert await outcome(runner, reward, claims) == (RolloutState.SUCCEEDED, None)
    assert [words[0] for words in claims.log] == ["seal", "agent_exit", "reward", "finish"]
    posted = {event.event_type: event.data for event in claims.events_posted}
    assert posted["reward"] == {"value": 0.5, "source": "function", "parts": {"style": 1.0}}
    assert posted["agent_exit"] == {
        "exit_code": 0,
        "signal": None,
        "timed_out": False,
        "duration_s": 1.5,
        "cpu_s": 0.25,
        "max_rss_mb": 30.0,
        "over_disk": False,
        "stdout_bytes": 19,
        "stderr_bytes": 0,
        "stdout_tail": "my key is ***",
        "stderr_tail": "",
    }
    assert runner.released == [("r1", "0")]


async def test_a_failed_agent_is_data_with_its_reward() -> None:
    claims = FakeClaims()
    state = await outcome(FakeRunner(lambda grant: ran(3)), FakeReward(), claims)
    assert state == (RolloutState.FAILED, "The agent ended with exit code 3.")
    assert "reward" in {event.event_type for event in claims.events_posted}


async def test_an_attempt_that_could_not_start_is_followed_by_another() -> None:
    def script(grant: Grant) -> AgentRun:
        if grant.attempt_id == "0":
            raise RunnerError("no memory.", "Buy some.")
        return ran()

    claims, runner = FakeClaims(), FakeRunner(script)
    assert await outcome(runner, claims=claims) == (RolloutState.SUCCEEDED, None)
    assert runner.started == [("r1", "0"), ("r1", "1")]
    assert claims.log[:2] == [("seal", "r1", "0"), ("next_attempt", "r1", "0")]


async def test_tries_are_bounded_and_the_last_cause_stays_with_the_rollout() -> None:
    def script(grant: Grant) -> AgentRun:
        raise RunnerError(f"cause {grant.attempt_id}.")

    runner = FakeRunner(script)
    assert await outcome(runner, attempts=2) == (RolloutState.FAILED, "cause 1.")
    assert len(runner.started) == 2


async def test_a_task_that_can_never_start_is_not_tried_again() -> None:
    def script(grant: Grant) -> AgentRun:
        raise ConfigError("no field.")

    runner = FakeRunner(script)
    assert await outcome(runner) == (RolloutState.FAILED, "no field.")
    assert len(runner.started) == 1


async def test_a_reward_that_is_not_given_begins_another_attempt_and_posts_no_reward() -> None:
    def give() -> Reward:
        raise RewardError("it raised.")

    claims, runner = FakeClaims(), FakeRunner()
    assert await outcome(runner, FakeReward(give), claims) == (RolloutState.FAILED, "it raised.")
    assert len(runner.started) == 3
    assert "reward" not in {event.event_type for event in claims.events_posted}


async def test_only_a_reward_function_that_asks_for_events_gets_them() -> None:
    indifferent, curious = FakeReward(), FakeReward(wants_events=True)
    await outcome(FakeRunner(), indifferent)
    await outcome(FakeRunner(), curious)
    assert indifferent.events == []
    assert [event["event_type"] for event in curious.events] == ["agent_exit"]


async def test_an_agent_that_reports_its_reward_must_have_done_so() -> None:
    claims = FakeClaims()
    state = await outcome(FakeRunner(), claims=claims, reports_reward=True)
    assert state == (RolloutState.FAILED, "The agent ended without posting its reward.")

    claims = FakeClaims()
    posted = Event(event_type="reward", rollout_id="r1", attempt_id="0", timestamp=0.0, data={"value": 1.0})
    claims.events_posted.append(posted)
    assert await outcome(FakeRunner(), claims=claims, reports_reward=True) == (RolloutState.SUCCEEDED, None)


async def test_a_call_that_was_never_served_begins_another_attempt() -> None:
    claims = FakeClaims(failures=[{"call_id": "a", "message": "It is dead."}])
    claims.served = [CallInfo("a", "r1", "0", 0, "chat", True, http_status=502)]
    state = await outcome(FakeRunner(lambda grant: ran(1)), FakeReward(), claims)
    assert state == (RolloutState.FAILED, "A model call could not be served: It is dead.")
    assert ("next_attempt", "r1", "0") in claims.log


async def test_calls_whose_answers_are_missing_excuse_a_failed_agent() -> None:
    claims = FakeClaims(incomplete=("a",))
    state = await outcome(FakeRunner(lambda grant: ran(1)), FakeReward(), claims, attempts=1)
    assert state[1] == "The answers of 1 model calls were never recorded, and the agent failed then."


async def test_no_more_agents_run_at_once_than_the_limit_and_each_end_makes_room() -> None:
    claims = FakeClaims()
    gates = {f"r{n}": asyncio.Event() for n in range(5)}
    runner = FakeRunner(lambda grant: None)
    async with controlled(claims, runner):
        await claims.add(*(granted(name) for name in gates))
        await claims.until(lambda: len(runner.running) == 2)
        assert claims.claims[0].limit == 2
    assert runner.most_at_once == 2
    assert runner.started == [("r0", "0"), ("r1", "0")]

    claims, runner = FakeClaims(), FakeRunner()
    async with controlled(claims, runner):
        await claims.add(*(granted(name) for name in gates))
        await claims.until(lambda: len(claims.states) == 5)
    assert runner.most_at_once <= 2


async def test_a_claim_names_what_runs() -> None:
    claims, runner = FakeClaims(), FakeRunner(lambda grant: None)
    async with controlled(claims, runner):
        await claims.add(granted())
        await claims.until(lambda: len(claims.claims) == 2)
    assert [claim.held for claim in claims.claims] == [[], ["r1"]]
    assert claims.claims[1].limit == 1


async def test_a_stop_ends_what_runs_and_leaves_its_rollout_to_be_claimed_again() -> None:
    claims, runner = FakeClaims(), FakeRunner(lambda grant: None)
    async with controlled(claims, runner) as running:
        await claims.add(granted())
        await claims.until(lambda: "r1" in runner.running)
    assert running.exception() is None
    assert not runner.running
    assert not claims.states


async def test_an_agent_whose_lease_is_lost_is_ended_and_its_rollout_left_alone() -> None:
    claims, runner = FakeClaims(), FakeRunner(lambda grant: None)
    async with controlled(claims, runner, settings=replace(SETTINGS, lease_s=0.05)):
        await claims.add(granted())
        await claims.until(lambda: "r1" in runner.running)
        claims.lost = {"r1"}
        await claims.until(lambda: not runner.running and bool(runner.released))
        await claims.add(granted("r2"))
        await claims.until(lambda: "r2" in runner.running)
    assert not claims.states


async def test_a_lease_that_ends_with_its_rollout_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    claims = FakeClaims()
    renewed = asyncio.Event()

    async def answer_late(name: str) -> None:
        if name == "finish":
            claims.lost = {"r1"}
            await renewed.wait()

    async def renew(name: str) -> None:
        await answer_late(name)
        if name == "report" and claims.lost:
            renewals.append(name)
            if len(renewals) > 3:
                renewed.set()

    renewals: list[str] = []
    claims.before = renew
    async with controlled(claims, FakeRunner(), settings=replace(SETTINGS, lease_s=0.01)):
        await claims.add(granted())
        await claims.until(lambda: claims.statuses and claims.statuses[-1].detail["finished"])
    assert "lease is lost" not in caplog.text


@pytest.mark.parametrize(("code", "attempts"), [(1, ["0", "1"]), (0, ["0"])])
async def test_an_agent_that_failed_while_the_gateway_was_started_anew_is_tried_again(code: int, attempts: list[str]):
    claims = FakeClaims()

    def end(grant: Grant) -> AgentRun:
        if grant.attempt_id == "0":
            claims.gateway = "second"
            return ran(code)
        return ran(0)

    runner = FakeRunner(end)
    state, _ = await outcome(runner, FakeReward(), claims)
    assert [attempt for _, attempt in runner.started] == attempts
    assert state is RolloutState.SUCCEEDED


async def test_an_agent_past_its_time_is_killed_and_scored() -> None:
    claims = FakeClaims()
    async with controlled(claims, FakeRunner(lambda grant: None), FakeReward(), replace(SETTINGS, timeout_s=0.01)):
        await claims.add(granted())
        await claims.until(lambda: bool(claims.states))
    assert claims.states["r1"] == (RolloutState.FAILED, "The agent ran into its time limit of 0.01 s.")


async def test_time_that_the_gateway_held_calls_does_not_count() -> None:
    claims, runner = FakeClaims(), FakeRunner(lambda grant: ran() if grant.rollout.rollout_id == "r2" else None)
    renewals = 0

    async def hold(name: str) -> None:
        nonlocal renewals
        if name == "renew":
            renewals += 1
            claims.held_total_s += 1000.0 if renewals < 5 else 0.0

    claims.before = hold
    async with controlled(claims, runner, settings=replace(SETTINGS, timeout_s=0.01)):
        await claims.add(granted())
        await claims.until(lambda: renewals >= 2)
        await claims.add(granted("r2"))
        await claims.until(lambda: "r2" in claims.states)
        assert runner.running == {"r1"}
        assert "r1" not in claims.states


@pytest.mark.parametrize("error", [NotFoundError("deleted", status=404), ConflictError("taken", status=409)])
async def test_a_rollout_that_is_ours_no_more_is_dropped(error: GatewayError) -> None:
    claims = FakeClaims()

    async def refuse(name: str) -> None:
        if name == "seal" and not claims.states:
            claims.before = lambda name: asyncio.sleep(0)
            raise error

    claims.before = refuse
    async with controlled(claims, FakeRunner()):
        await claims.add(granted("r1"))
        await claims.until(lambda: ("seal", "r1", "0") in claims.log)
        await claims.add(granted("r2"))
        await claims.until(lambda: "r2" in claims.states)
    assert list(claims.states) == ["r2"]


async def test_one_rollout_that_cannot_go_on_fails_alone() -> None:
    claims = FakeClaims()

    async def refuse(name: str) -> None:
        if name == "agent_exit":
            raise GatewayError("The gateway answered 413.", status=413)

    claims.before = refuse
    async with controlled(claims, FakeRunner()):
        await claims.add(granted())
        await claims.until(lambda: bool(claims.states))
    assert claims.states["r1"] == (RolloutState.FAILED, "The controller could not go on: The gateway answered 413.")
    assert [words[0] for words in claims.log].count("next_attempt") == 2


@pytest.mark.parametrize("error", [GatewayError("It answered 500.", status=500), RecursionError("too deep")])
async def test_an_unexpected_fault_fails_one_attempt_only(error: Exception) -> None:
    claims = FakeClaims()

    async def fail_once(name: str) -> None:
        if name == "agent_exit" and ("next_attempt", "r1", "0") not in claims.log:
            raise error

    claims.before = fail_once
    assert await outcome(FakeRunner(), FakeReward(), claims) == (RolloutState.SUCCEEDED, None)


async def test_a_reason_that_holds_half_a_character_can_be_sent() -> None:
    def script(grant: Grant) -> AgentRun:
        raise ConfigError("no field \udcff.")

    assert await outcome(FakeRunner(script)) == (RolloutState.FAILED, "no field \\udcff.")


async def test_a_gateway_that_stays_silent_ends_the_controller_and_its_agents() -> None:
    claims, runner = FakeClaims(), FakeRunner(lambda grant: None)
    async with controlled(claims, runner, settings=replace(SETTINGS, lease_s=0.05)) as running:
        await claims.add(granted())
        await claims.until(lambda: "r1" in runner.running)

        async def silent(name: str) -> None:
            raise GatewayError("The gateway does not answer.")

        claims.before = silent
        await asyncio.wait([running], timeout=30)
        assert isinstance(running.exception(), GatewayError)
    assert not runner.running


async def test_the_controller_says_what_it_does() -> None:
    claims, runner = FakeClaims(), FakeRunner()
    async with controlled(claims, runner):
        await claims.add(granted())
        await claims.until(lambda: any(status.detail["finished"] for status in claims.statuses))
    status = claims.statuses[-1]
    assert (status.part, status.state, status.waiting_for) == ("controller", "idle", "rollouts")
    ways = {"isolation": "none: a fake", "starts": "cold"}
    assert status.detail == {"running": 0, "finished": 1, "failed": 0, "limit": 2, **ways}


@pytest.mark.parametrize("turns", range(12))
async def test_a_stop_at_the_moment_of_a_rollouts_end_is_not_missed(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "REPORT_PAUSE_S", 0.0)
    claims, runner, stop = FakeClaims(), FakeRunner(), asyncio.Event()
    controller = Controller(cast(GatewayClient, claims), runner, None, SETTINGS)

    def stop_in(turns: int) -> None:
        asyncio.get_running_loop().call_soon(stop_in, turns - 1) if turns else stop.set()

    async def at_the_end(name: str) -> None:
        if name == "finish":
            stop_in(turns)

    claims.before = at_the_end
    running = asyncio.create_task(controller.run(stop))
    await claims.until(lambda: claims.statuses and claims.claims)
    await claims.add(granted())
    done, _ = await asyncio.wait([running], timeout=5)
    assert done
