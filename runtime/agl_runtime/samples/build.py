"""From a rollout's recorded calls to its training rows.

Each leaf of the forest (`forest.py`) is one row: its first prompt, then sampled and observed tokens in order. Sampled
tokens that several rows share are trained in the row whose leaf was committed first. A row over the response limit
is cut with all its side arrays; a first prompt over its limit drops the row. A branch that trains nothing makes no
row. Every call that trains nothing is counted with its reason, so that `calls` is always the sum of the calls that
train and of `untrained`. Pure and deterministic; the input is left untouched and its order does not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from agl_runtime.calls import Call, Experts, RolloutCalls
from agl_runtime.samples.diagnose import Decode, diagnose, shared_prefix
from agl_runtime.samples.forest import Node, grow, kept, logprobs_usable, path_to
from agl_runtime.samples.types import Break, BuildReport, Limits, RolloutSamples, Sample

PROMPT_OVER_LIMIT = "prompt_over_limit"
RESPONSE_OVER_LIMIT = "response_over_limit"
UNDIAGNOSED = "undiagnosed"


def build_samples(rollout: RolloutCalls, limits: Limits, decode: Decode | None = None) -> RolloutSamples:
    """The samples of a rollout, in commit order of their leaves. `decode` gives the text of ids, special tokens kept;
    without it the causes of splits are `undiagnosed`."""
    calls = sorted(rollout.calls, key=lambda call: (call.info.commit_seq, call.info.seq, call.info.call_id))
    untrained = Counter(reason for call in calls if (reason := _unplaced(call)) is not None)
    nodes = grow([call for call in calls if _unplaced(call) is None])
    untrained.update(node.reason for node in nodes if node.reason is not None)
    keep = kept(nodes)
    splits = _splits(nodes, keep, decode)

    samples: list[Sample] = []
    dropped: Counter[str] = Counter()
    laid: set[int] = set()
    for leaf in _leaves(nodes, keep):
        path = path_to(nodes, leaf)
        new = [index for index in path if index not in laid]
        laid.update(new)
        trained = [index for index in new if nodes[index].reason is None]
        if nodes[path[0]].start > limits.max_prompt_tokens:
            dropped[PROMPT_OVER_LIMIT] += 1
            untrained[PROMPT_OVER_LIMIT] += len(trained)
            continue
        cut = nodes[path[0]].start + limits.max_response_tokens
        within = {index for index in trained if nodes[index].start < cut}
        untrained[RESPONSE_OVER_LIMIT] += len(trained) - len(within)
        if within:
            broke = next((splits[index] for index in new if index in splits), None)
            samples.append(_row(rollout.rollout_id, nodes, path, within, cut, broke))

    report = BuildReport(
        calls=len(calls),
        sampled_tokens=sum(call.sampled_ids.size for call in calls),
        trained_tokens=sum(int(sample.mask.sum()) for sample in samples),
        splits=dict(Counter(broke.cause for broke in splits.values())),
        untrained=dict(+untrained),
        dropped=dict(dropped),
    )
    return RolloutSamples(rollout.rollout_id, tuple(samples), report)


def _unplaced(call: Call) -> str | None:
    """Why a call has no place in the forest."""
    if not call.info.committed:
        return call.info.reason or "not_committed"
    if not call.prompt_ids.size:
        return call.info.reason or "no_prompt_ids"
    if not call.sampled_ids.size:
        return call.info.reason or "empty_generation"
    return None


def _leaves(nodes: Sequence[Node], keep: Sequence[bool]) -> list[int]:
    return [
        index for index, node in enumerate(nodes) if keep[index] and not any(keep[child] for child in node.children)
    ]


def _row(
    rollout_id: str, nodes: Sequence[Node], path: Sequence[int], trained: set[int], cut: int, broke: Break | None
) -> Sample:
    leaf, first = nodes[path[-1]], nodes[path[0]]
    size = min(leaf.end, cut)
    mask = np.zeros(size, np.bool_)
    logprobs = np.zeros(size, np.float32)
    updates = np.full(size, -1, np.int32)
    along = [index for index in path if nodes[index].start < size]
    for index in along:
        start, stop, call = nodes[index].start, min(nodes[index].end, size), nodes[index].call
        mask[start:stop] = index in trained
        if logprobs_usable(call):
            logprobs[start:stop] = call.logprobs[: stop - start]
        for span in call.spans:
            updates[start + span.start : start + span.end] = span.version.updates
    return Sample(
        rollout_id=rollout_id,
        ids=np.concatenate([leaf.call.prompt_ids, leaf.call.sampled_ids])[:size],
        mask=mask,
        logprobs=logprobs,
        updates=updates,
        prompt_len=first.start,
        call_ids=tuple(nodes[index].call.info.call_id for index in along),
        broke=broke,
        truncated=leaf.end > cut,
        routed=_routed(leaf.call, size),
    )


def _routed(leaf: Call, size: int) -> Experts | None:
    """Its trace begins with those of all calls along the row, so its routing is the row's."""
    if leaf.routing is None:
        return None
    whole = leaf.routing.whole()
    return np.concatenate([whole, np.zeros_like(whole[:1])])[:size]


def _splits(nodes: Sequence[Node], keep: Sequence[bool], decode: Decode | None) -> dict[int, Break]:
    """The break of each kept main call that did not continue where it might have."""
    splits = {}
    for index, node in enumerate(nodes):
        if not keep[index] or not node.is_main or node.retry:
            continue
        other = _should_continue(nodes, index)
        if other is not None:
            line = [nodes[step].call for step in path_to(nodes, other)]
            unknown = Break(UNDIAGNOSED, node.call.info.call_id, line[-1].info.call_id)
            splits[index] = diagnose(node.call, line, decode) if decode is not None else unknown
    return splits


def _should_continue(nodes: Sequence[Node], index: int) -> int | None:
    """The earlier trace that a call broke off from: the linked one where its ids disagree; for a new root or a second
    child, the one it shares most ids with, the latest of equals. None where the call simply continues."""
    node = nodes[index]
    if node.linked is not None:
        return node.linked if node.parent != node.linked else None
    if node.parent is not None and not _went_on(nodes, node.parent, index):
        return None
    ends = [i for i in range(index) if nodes[i].is_main and not _went_on(nodes, i, index)]
    return max(ends, key=lambda i: (shared_prefix(node.call.prompt_ids, nodes[i].call), i), default=None)


def _went_on(nodes: Sequence[Node], index: int, before: int) -> bool:
    return any(child < before and nodes[child].is_main for child in nodes[index].children)
