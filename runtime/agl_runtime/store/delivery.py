"""Whether a committed call counts for training once it is known what became of it (pure)."""

from __future__ import annotations


def settle(
    trainable: bool, reason: str | None, *, delivered: bool, continued: bool, retried: bool
) -> tuple[bool, str | None]:
    """(trainable, reason) of a committed call, as a reader sees it.

    `trainable` and `reason` are what was found at its commit. `delivered`: its last byte went out to the agent.
    `continued`: the prompt of a call committed later begins with this call's prompt and sampled ids, which proves that
    the agent had it. `retried`: a newer call with the same retry key is committed. A delivered call that was retried
    stays trainable: the same bytes sent twice are two calls.
    """
    if not trainable or delivered or continued:
        return trainable, reason
    return False, "superseded" if retried else "undelivered"
