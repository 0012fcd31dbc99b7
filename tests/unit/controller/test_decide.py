"""What follows from what is known of an attempt."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.calls import CallInfo
from agl_runtime.controller.decide import (
    LONGEST_PAUSE_S,
    Facts,
    Finish,
    Retry,
    Score,
    decide,
    free_slots,
    time_left,
    unserved,
)
from agl_runtime.controller.runners.base import AgentExit
from agl_runtime.schemas import Event, RolloutState


def ended(
    code: int | None = 0, signal: int | None = None, *, timed_out: bool = False, over_disk: bool = False
) -> AgentExit:
    return AgentExit(code, signal, timed_out, duration_s=1.0, cpu_s=0.1, max_rss_mb=10.0, over_disk=over_disk)


FACTS = Facts(tries=1, max_tries=3, timeout_s=600.0, wants_reward=True, exit=ended())
FAILED_ENDS = [ended(3), ended(None, signal.SIGSEGV), ended(None, signal.SIGKILL, timed_out=True)]


def test_an_agent_that_ended_well_is_scored_and_then_succeeds() -> None:
    assert decide(FACTS) == Score()
    assert decide(replace(FACTS, has_reward=True)) == Finish(RolloutState.SUCCEEDED)


@pytest.mark.parametrize("how", FAILED_ENDS)
def test_an_agents_own_failure_is_scored_too(how: AgentExit) -> None:
    assert decide(replace(FACTS, exit=how)) == Score()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (FAILED_ENDS[0], "The agent ended with exit code 3."),
        (FAILED_ENDS[1], "The agent was ended by SIGSEGV."),
        (FAILED_ENDS[2], "The agent ran into its time limit of 600 s."),
        (ended(0, over_disk=True), "The agent took more disk space than agent.disk_mb allows."),
    ],
)
def test_a_failed_agent_fails_its_rollout_with_the_cause(how: AgentExit, message: str) -> None:
    assert decide(replace(FACTS, exit=how, has_reward=True)) == Finish(RolloutState.FAILED, message)


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    finish = decide(replace(FACTS, exit=ended(None, 63), has_reward=True))
    assert finish == Finish(RolloutState.FAILED, "The agent was ended by signal 63.")


def test_without_a_reward_function_the_end_alone_decides() -> None:
    assert decide(replace(FACTS, wants_reward=False)) == Finish(RolloutState.SUCCEEDED)


@pytest.mark.parametrize(
    "fault",
    [{"exit": None, "start_error": "no program"}, {"reward_error": "it raised"}, {"unserved": "the server is dead"}],
)
def test_a_fault_of_the_infrastructure_begins_another_attempt_until_the_tries_are_used_up(
    fault: dict[str, str | None],
) -> None:
    facts = replace(FACTS, **fault)  # type: ignore[arg-type]
    sentence = next(value for value in fault.values() if value)
    assert decide(facts) == Retry(1.0, sentence)
    assert decide(replace(facts, tries=2)) == Retry(2.0, sentence)
    assert decide(replace(facts, tries=3)) == Finish(RolloutState.FAILED, sentence)


def test_a_fault_that_every_attempt_would_meet_ends_the_rollout_at_once() -> None:
    facts = replace(FACTS, exit=None, start_error="no field `x`", hopeless=True)
    assert decide(facts) == Finish(RolloutState.FAILED, "no field `x`")


@pytest.mark.parametrize(
    "how", [ended(0), ended(None, signal.SIGKILL, timed_out=True), ended(None, signal.SIGKILL, over_disk=True)]
)
def test_a_call_left_open_by_an_agent_that_ended_well_or_ran_out_of_time_is_its_own_doing(how: AgentExit) -> None:
    assert decide(replace(FACTS, exit=how, lost_calls=1)) == Score()


def test_a_call_that_was_never_recorded_excuses_an_agent_that_failed() -> None:
    action = decide(replace(FACTS, exit=ended(1), lost_calls=2))
    assert action == Retry(1.0, "The answers of 2 model calls were never recorded, and the agent failed then.")


@given(
    tries=st.integers(1, 20),
    max_tries=st.integers(1, 20),
    code=st.integers(0, 3),
    timed_out=st.booleans(),
    lost_calls=st.integers(0, 2),
    texts=st.lists(st.none() | st.just("why"), min_size=3, max_size=3),
    has_reward=st.booleans(),
)
def test_every_decision_ends_or_goes_on_within_bounds(
    tries: int,
    max_tries: int,
    code: int,
    timed_out: bool,
    lost_calls: int,
    texts: list[str | None],
    has_reward: bool,
) -> None:
    start_error, unserved_call, reward_error = texts
    facts = Facts(
        tries,
        max_tries,
        timeout_s=1.0,
        wants_reward=True,
        start_error=start_error,
        exit=ended(code, timed_out=timed_out),
        lost_calls=lost_calls,
        unserved=unserved_call,
        has_reward=has_reward,
        reward_error=reward_error,
    )
    action = decide(facts)
    if isinstance(action, Retry):
        assert tries < max_tries
        assert 0 < action.pause_s <= LONGEST_PAUSE_S
    if any(texts):
        assert not isinstance(action, Score)
        assert action != Finish(RolloutState.SUCCEEDED)
    if action == Finish(RolloutState.SUCCEEDED):
        assert has_reward
        assert code == 0


def call(call_id: str, seq: int, *, status: int | None = 200, committed: bool = True) -> CallInfo:
    return CallInfo(call_id, "r", "0", seq, "chat", committed, http_status=status)


def failure(call_id: str | None, message: str = "The model server answered 500.") -> Event:
    data = {"call_id": call_id, "message": message, "http_status": 502}
    return Event(event_type="upstream_failure", rollout_id="r", attempt_id="0", timestamp=0.0, data=data)


def test_a_failed_call_is_made_good_by_a_later_one_that_was_served() -> None:
    calls = [call("a", 0), call("b", 1, status=502), call("c", 2)]
    assert unserved([failure("b")], calls, ended_well=False) is None


def test_a_failed_call_without_a_later_answer_is_unserved_however_the_agent_ended() -> None:
    calls = [call("a", 0), call("b", 1, status=502), call("c", 2, status=502)]
    for ended_well in (True, False):
        cause = unserved([failure("b"), failure("c", "It is silent.")], calls, ended_well=ended_well)
        assert cause == "A model call could not be served: It is silent."


def test_a_call_that_was_cut_off_later_makes_nothing_good() -> None:
    calls = [call("b", 1, status=502), call("c", 2, status=499), call("d", 3, status=None, committed=False)]
    assert unserved([failure("b")], calls, ended_well=False) is not None


def test_a_failure_before_any_record_counts_unless_the_agent_ended_well() -> None:
    assert unserved([failure(None)], [call("a", 0)], ended_well=True) is None
    assert unserved([failure(None)], [call("a", 0)], ended_well=False) is not None


def test_no_failure_is_no_cause() -> None:
    assert unserved([], [call("a", 0, status=502)], ended_well=False) is None


def test_places_and_time_are_counted_without_what_runs_and_what_was_held() -> None:
    assert free_slots(4, 1) == 3
    assert free_slots(2, 5) == 0
    assert time_left(10.0, elapsed_s=12.0, held_s=5.0) == 3.0
