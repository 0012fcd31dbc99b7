"""Which call continues which: a rollout's calls as a forest over exact token prefixes, and which of them train.

A call continues the longest earlier trace (prompt + sampled ids) that its prompt begins with, wherever that trace
stands; a link that the gateway recorded decides instead where the ids agree with it. Text is never looked at.

Invariants: parents come before children in commit order; a node's trace is an exact prefix of its children's prompts;
an empty generation is no node; a node with `reason` None trains. Calls are never changed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from agl_runtime.calls import Call, Ids

AMBIGUOUS_PARENT = "ambiguous_parent"
SUPERSEDED = "superseded"
UNRESOLVED_RETRY = "unresolved_retry"


@dataclass(slots=True)
class Node:
    """A call in the forest; it sampled the tokens [start, end) of its trace. Indices are positions in commit order.

    `linked` is the node that the gateway's link names, whether or not the ids agree. `retry` marks a call whose parent
    and prompt are those of an earlier one.
    """

    call: Call
    start: int
    end: int
    parent: int | None
    linked: int | None
    reason: str | None
    retry: bool = False
    children: list[int] = field(default_factory=list)

    @property
    def is_main(self) -> bool:
        return self.call.info.kind == "main"


def grow(calls: Sequence[Call]) -> list[Node]:
    """The forest of `calls`, which are committed, in commit order and have prompt and sampled ids."""
    nodes: list[Node] = []
    by_id: dict[str | None, int] = {}
    by_length: list[tuple[int, int]] = []
    ambiguous: set[int] = set()
    for index, call in enumerate(calls):
        linked = by_id.get(call.info.parent_id)
        parent, unclear = _parent(call.prompt_ids, nodes, by_length, linked)
        ambiguous.update(unclear)
        if parent is not None:
            nodes[parent].children.append(index)
        start = call.prompt_ids.size
        end = start + call.sampled_ids.size
        nodes.append(Node(call, start, end, parent, linked, _reason(call)))
        by_id[call.info.call_id] = index
        insort(by_length, (end, index))
    for index in ambiguous:
        nodes[index].reason = nodes[index].reason or AMBIGUOUS_PARENT
    _settle_retries(nodes)
    return nodes


def logprobs_usable(call: Call) -> bool:
    """One finite log-probability for each sampled token."""
    return call.logprobs.size == call.sampled_ids.size and bool(np.isfinite(call.logprobs).all())


def kept(nodes: Sequence[Node]) -> list[bool]:
    """True for what trains and for what is context to it; a branch that trains nothing is False throughout."""
    keep = [node.reason is None for node in nodes]
    for index in reversed(range(len(nodes))):
        parent = nodes[index].parent
        if keep[index] and parent is not None:
            keep[parent] = True
    return keep


def path_to(nodes: Sequence[Node], index: int) -> list[int]:
    """From the root to `index`."""
    path = [index]
    while (parent := nodes[path[-1]].parent) is not None:
        path.append(parent)
    return path[::-1]


def _reason(call: Call) -> str | None:
    if not call.info.trainable:
        return call.info.reason or "untrainable"
    if call.info.kind == "auxiliary":
        return "auxiliary"
    if not logprobs_usable(call):
        return "logprobs_not_finite" if call.logprobs.size == call.sampled_ids.size else "logprobs_length"
    return None


def _parent(
    prompt: Ids, nodes: Sequence[Node], by_length: Sequence[tuple[int, int]], linked: int | None
) -> tuple[int | None, list[int]]:
    """The parent, and the nodes that cannot be told apart from it."""
    if linked is not None and _continues(prompt, nodes[linked].call):
        return linked, []
    equal = _longest(prompt, nodes, by_length)
    if len(equal) < 2:
        return (equal[0] if equal else None), []
    delivered = [index for index in equal if nodes[index].call.info.delivered]
    if len(delivered) == 1:
        return delivered[0], []
    return equal[0], equal


def _longest(prompt: Ids, nodes: Sequence[Node], by_length: Sequence[tuple[int, int]]) -> list[int]:
    """The nodes with the longest trace that `prompt` begins with; several when their traces are the same ids."""
    found: list[int] = []
    for position in reversed(range(bisect_right(by_length, (prompt.size, len(nodes))))):
        length, index = by_length[position]
        if found and length < nodes[found[0]].end:
            break
        if _continues(prompt, nodes[index].call):
            found.append(index)
    return found[::-1]


def _continues(prompt: Ids, call: Call) -> bool:
    start, end = call.prompt_ids.size, call.prompt_ids.size + call.sampled_ids.size
    # The short sampled part first: where two lines differ at all, it nearly always differs.
    return (
        end <= prompt.size
        and np.array_equal(prompt[start:end], call.sampled_ids)
        and np.array_equal(prompt[:start], call.prompt_ids)
    )


def _settle_retries(nodes: Sequence[Node]) -> None:
    """Of calls with one parent and one prompt, train those that were continued; else all that were delivered, as votes
    are; else none, as nothing tells which answer the agent had."""
    continued = {index for node in nodes for index in (node.parent, node.linked) if index is not None}
    for group in _retries(nodes):
        delivered = [index for index in group if nodes[index].call.info.delivered]
        used = [index for index in group if index in continued] or delivered
        for index in set(group) - set(used):
            nodes[index].reason = nodes[index].reason or (SUPERSEDED if used else UNRESOLVED_RETRY)
        for index in group[1:]:
            nodes[index].retry = True


def _retries(nodes: Sequence[Node]) -> Iterator[list[int]]:
    """Groups of two or more main calls with the same parent and the same prompt."""
    groups: dict[tuple[int | None, int], list[list[int]]] = {}
    for index, node in enumerate(nodes):
        if not node.is_main:
            continue
        same_length = groups.setdefault((node.parent, node.start), [])
        for group in same_length:
            if np.array_equal(nodes[group[0]].call.prompt_ids, node.call.prompt_ids):
                group.append(index)
                break
        else:
            same_length.append([index])
    return (group for same_length in groups.values() for group in same_length if len(group) > 1)
