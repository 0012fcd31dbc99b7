"""What the controller does next with a rollout, as pure functions over plain data.

An agent's own failure (another exit code than 0, a signal, a limit of its time or disk space) is data: the reward
function judges it and the rollout fails *with* its reward. Only a failure of the infrastructure begins another attempt:

- the agent could not be started, or the reward function gave no reward;
- a model call could not be served and no later one was, however the agent then ended: it never had a chance;
- the gateway was started anew while the agent ran, and the agent failed by itself: no call of it may have got through;
- a call was sent on, its answer never recorded, and the agent then failed by itself. An agent that ended well, or ran
  into a limit, with such a call left its stream on its own account: that is the agent's behaviour.

A fault that every attempt would meet again (a task without a field that the command names) ends the rollout at once.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from agl_runtime.calls import CallInfo
from agl_runtime.controller.runners.base import AgentExit
from agl_runtime.schemas import Event, RolloutState

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a rollout's present attempt; `tries` counts the attempts of this controller, with this one.

    `start_error`, `unserved` and `reward_error` are sentences, or None where nothing of the kind happened.
    """

    tries: int
    max_tries: int
    timeout_s: float
    wants_reward: bool = False
    start_error: str | None = None
    hopeless: bool = False
    exit: AgentExit | None = None
    lost_calls: int = 0
    gateway_restarted: bool = False
    unserved: str | None = None
    has_reward: bool = False
    reward_error: str | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Run the reward function."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Begin another attempt after `pause_s`."""

    pause_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """End the rollout."""

    state: RolloutState
    error_message: str | None = None


Action = Score | Retry | Finish


def decide(facts: Facts) -> Action:
    """The next action on a rollout whose agent could not be started, or has ended."""
    fault = facts.start_error or _record_fault(facts) or facts.reward_error
    if fault is not None:
        return follow_fault(fault, facts.tries, 0 if facts.hopeless else facts.max_tries)
    if facts.wants_reward and not facts.has_reward:
        return Score()
    failure = _agent_failure(facts)
    return Finish(RolloutState.FAILED if failure else RolloutState.SUCCEEDED, failure)


def follow_fault(fault: str, tries: int, max_tries: int) -> Finish | Retry:
    """What follows a failure of the infrastructure."""
    if tries >= max_tries:
        return Finish(RolloutState.FAILED, fault)
    return Retry(min(FIRST_PAUSE_S * 2.0 ** (tries - 1), LONGEST_PAUSE_S), fault)


def _record_fault(facts: Facts) -> str | None:
    if facts.unserved is not None:
        return facts.unserved
    failed_itself = facts.exit is not None and not facts.exit.ok and not facts.exit.was_stopped
    if facts.lost_calls and failed_itself:
        return f"The answers of {facts.lost_calls} model calls were never recorded, and the agent failed then."
    if facts.gateway_restarted and failed_itself:
        return "The gateway was started anew while the agent ran, and the agent failed."
    return None


def _agent_failure(facts: Facts) -> str | None:
    if facts.exit is None or facts.exit.ok:
        return None
    if facts.exit.over_disk:
        return "The agent took more disk space than agent.disk_mb allows."
    if facts.exit.timed_out:
        return f"The agent ran into its time limit of {facts.timeout_s:g} s."
    if facts.exit.signal is not None:
        return f"The agent was ended by {signal_name(facts.exit.signal)}."
    return f"The agent ended with exit code {facts.exit.exit_code}."


def readable(text: str) -> str:
    """The text with half characters, which cannot be sent, written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def unserved(failures: Sequence[Event], calls: Sequence[CallInfo], *, ended_well: bool) -> str | None:
    """The cause of a failure to serve a call that was never made good, or None.

    `failures` are `upstream_failure` events, whose data hold `message` and, for a call that is on record, `call_id`.
    Such a call was made good by a later one that was served. One that is not on record has no place among the others:
    an agent that ended well got past it.
    """
    place = {call.call_id: call.seq for call in calls}
    last_served = max((call.seq for call in calls if call.committed and call.http_status == 200), default=-1)
    for event in reversed(failures):
        failed = place.get(str(event.data.get("call_id")))
        if last_served < failed if failed is not None else not ended_well:
            return f"A model call could not be served: {event.data.get('message') or 'the model server failed.'}"
    return None


def free_slots(limit: int, active: int) -> int:
    return max(0, limit - active)


def time_left(timeout_s: float, elapsed_s: float, held_s: float) -> float:
    """Seconds that an agent may still run: time in which the gateway held calls does not count."""
    return timeout_s - (elapsed_s - held_s)
