"""Why a run that began without any spread of rewards cannot learn, and what to do about it (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agl_runtime.trainer.evaluation import PASS_AT
from agl_runtime.trainer.rollouts import Result
from agl_runtime.trainer.scoring import NO_SPREAD


def no_signal(ended: Sequence[Result], skipped: Sequence[str]) -> str:
    """Cause and remedies, from the rollouts of the first steps and the reasons why these steps were skipped."""
    return f"No signal: none of the first {len(skipped)} steps could teach the policy anything. {_why(ended, skipped)}"


def _why(ended: Sequence[Result], skipped: Sequence[str]) -> str:
    rewards = [item.reward for item in ended if item.reward is not None]
    if all(item.error for item in ended):
        return _all_failed(ended)
    if not any(item.call_count for item in ended):
        if all(item.agent_error for item in ended):
            how = Counter(item.agent_error for item in ended).most_common(1)[0][0]
            return f"Every agent failed before its first model call; most often it {how}. Try it with `agl run`."
        return (
            "No agent made a model call through the gateway. Check with `agl run` that the agent takes its "
            "model's address from the environment, and run `agl init` if it does not."
        )
    if any(reason != NO_SPREAD for reason in skipped):
        last = next(reason for reason in reversed(skipped) if reason != NO_SPREAD)
        return f"At last {last}. `agl rollouts show ID` shows a rollout's calls, each with its reason."
    if max(rewards) > min(rewards):
        return (
            "Rewards differ between tasks but never within a group: every task is always solved or never. Use tasks "
            "of middling difficulty, a larger train.group_size or a higher train.temperature."
        )
    return _all_equal(rewards[0])


def _all_failed(ended: Sequence[Result]) -> str:
    errors = Counter(item.error or "no reason given" for item in ended)
    return (
        f"Every rollout failed, most often because: {errors.most_common(1)[0][0].rstrip('.')}. "
        "Look at `agl logs controller` and at one rollout with `agl rollouts show ID`."
    )


def _all_equal(reward: float) -> str:
    if reward >= PASS_AT:
        return (
            f"Every reward is {reward:g}: the tasks are too easy for this policy, or the reward function always says "
            "yes. Use harder tasks, or make the reward function stricter."
        )
    return (
        f"Every reward is {reward:g}: the tasks are too hard for this policy, the agent fails before it can solve "
        "any, or the reward function is constant. Look at one rollout with `agl rollouts show ID`; then use easier "
        "tasks, a stronger policy, a reward that also gives part of the credit, a higher train.temperature or a larger "
        "train.group_size."
    )
