from __future__ import annotations

import re

import pytest

from agl_runtime.trainer.diagnosis import no_signal
from agl_runtime.trainer.rollouts import Ended
from agl_runtime.trainer.scoring import NO_SPREAD
from fakes.trained import make_ended

CASES = [
    ([make_ended(reward=0.0)] * 4, "Every reward is 0: the tasks are too hard for this policy, .* easier tasks"),
    ([make_ended(reward=1.0)] * 4, "Every reward is 1: the tasks are too easy .* Use harder tasks"),
    ([make_ended(reward=0.3)] * 4, "Every reward is 0.3: .* reward function is constant"),
    ([make_ended(reward=0.0, calls=0)] * 4, "No agent made a model call through the gateway.*agl init"),
    (
        [make_ended(reward=0.0, calls=0, agent_error="ran into its time limit")] * 4,
        "Every agent failed before its first model call; most often it ran into its time limit. Try it with `agl run`.",
    ),
    (
        [make_ended(reward=None, error="python3 is not there.")] * 3 + [make_ended(reward=None)],
        "Every rollout failed, most often because: python3 is not there. Look at `agl logs",
    ),
    (
        [make_ended(reward=0.0, calls=0, error="The agent ended with exit code 2.")] * 4,
        "Every rollout failed, most often because: The agent ended with exit code 2. Look at",
    ),
    (
        [make_ended(reward=0.0)] * 2 + [make_ended(reward=1.0)] * 2,
        "Rewards differ between tasks but never within a group",
    ),
]


@pytest.mark.parametrize(("ended", "sentence"), CASES)
def test_the_cause_is_told_apart_by_what_the_rollouts_show(ended: list[Ended], sentence: str) -> None:
    with_head = f"^No signal: none of the first 2 steps could teach the policy anything. {sentence}"
    assert re.search(with_head, no_signal(ended, [NO_SPREAD, NO_SPREAD]))


def test_calls_that_cannot_be_trained_on_are_the_cause_where_rewards_do_differ() -> None:
    ended = [make_ended(reward=0.0), make_ended(reward=1.0)]
    reason = "no model call of a group whose rewards differ can be trained on: no_logprobs"
    assert f"At last {reason}. `agl rollouts show ID`" in no_signal(ended, [NO_SPREAD, reason])
