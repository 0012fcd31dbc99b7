"""A model call with its token arrays, and the compact binary form in which a rollout's calls travel.

Token ids are int32 and log-probabilities float32 numpy arrays of one dimension. On the wire and on disk a call keeps of
its prompt only what is new since an earlier call of the same attempt (`Delta`), so a conversation of n turns costs its
own length; a digest of the whole prompt is checked whenever it is rebuilt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import msgpack
import numpy as np
from numpy.typing import NDArray

from agl_runtime.errors import StoreError
from agl_runtime.schemas import PolicyVersion

Ids = NDArray[np.int32]
LogProbs = NDArray[np.float32]
Experts = NDArray[np.integer[Any]]  # uint8, or int16 where there are more than 256
WIRE_VERSION = 1


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens `start` (inclusive) to `end` (exclusive) come from the weights named `version`."""

    start: int
    end: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class CallInfo:
    """What is known of a call beside its tokens. A call without `committed` was sent on and never came back whole.

    `seq` orders the calls of an attempt by their start, `commit_seq` by their commit (-1 before it). `parent_id` is the
    call that this one continues where the gateway knows it for certain. `reason` names why a call is not trainable.
    """

    call_id: str
    rollout_id: str
    attempt_id: str
    seq: int
    dialect: str
    committed: bool
    commit_seq: int = -1
    delivered: bool = False
    parent_id: str | None = None
    kind: Literal["main", "auxiliary"] = "main"
    trainable: bool = False
    reason: str | None = None
    model: str = ""
    finish_reason: str | None = None
    http_status: int | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that a Mixture-of-Experts sent a call's tokens to: `tail` [n, layers, k] tells those of the tokens
    from `start` on, `base` those of the tokens before, as the call that first had them in its trace recorded them. It
    ends before the last sampled token, which never went through the model."""

    start: int
    tail: Experts
    base: Routing | None = None

    def whole(self) -> Experts:
        """[P + S - 1, layers, k], a copy."""
        parts, end, at = [self.tail], self.start, self.base
        while end and at is not None:
            parts.append(at.tail[: max(0, end - at.start)])
            end, at = min(end, at.start), at.base
        return np.concatenate(parts[::-1])


@dataclass(frozen=True, slots=True)
class Call:
    """A call with whole token arrays: `prompt_ids` [P], `sampled_ids` [S], `logprobs` [S] (natural log). `routing` is
    None where not all of it is on record."""

    info: CallInfo
    prompt_ids: Ids
    sampled_ids: Ids
    logprobs: LogProbs
    spans: tuple[VersionSpan, ...] = ()
    routing: Routing | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A prompt as the first `keep` ids of (prompt + sampled) of the call `base_id`, then `tail`."""

    base_id: str | None
    keep: int
    tail: Ids
    digest: bytes


@dataclass(frozen=True, slots=True)
class PackedCall:
    """A call as it is stored and sent. `routing` has no base: that is the routing of the prompt's base."""

    info: CallInfo
    prompt: Delta
    sampled_ids: Ids
    logprobs: LogProbs
    spans: tuple[VersionSpan, ...] = ()
    routing: Routing | None = None


@dataclass(frozen=True, slots=True)
class RolloutCalls:
    """The last attempt of a rollout as the trainer reads it. `incomplete` lists calls sent on but never committed."""

    rollout_id: str
    attempt_id: str
    calls: tuple[Call, ...]
    reward: float | None
    incomplete: tuple[str, ...] = ()


def ids_array(values: Iterable[int]) -> Ids:
    return np.fromiter(values, dtype=np.int32)


def digest_ids(ids: Ids) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(ids).tobytes(), digest_size=12).digest()


def common_prefix(a: Ids, b: Ids) -> int:
    """Number of leading elements that are equal."""
    n = min(a.size, b.size)
    differs = np.nonzero(a[:n] != b[:n])[0]
    return int(differs[0]) if differs.size else n


def make_delta(prompt: Ids, base_id: str | None, keep: int) -> Delta:
    """Express `prompt`, whose first `keep` ids are those of the call `base_id`, prompt + sampled."""
    return Delta(base_id if keep else None, keep, prompt[keep:].copy(), digest_ids(prompt))


def rebuild(delta: Delta, bases: dict[str, Ids], call_id: str) -> Ids:
    """Inverse of `make_delta`; `bases` maps call ids to (prompt + sampled). Raises StoreError on a wrong digest."""
    if delta.base_id is None:
        prompt = delta.tail
    elif delta.base_id in bases:
        prompt = np.concatenate([bases[delta.base_id][: delta.keep], delta.tail])
    else:
        raise StoreError(f"call {call_id} builds on call {delta.base_id}, which is missing.", "Restore the store file.")
    if digest_ids(prompt) != delta.digest:
        raise StoreError(f"The prompt of call {call_id} does not match its digest.", "Restore the store file.")
    return prompt


def unpack(packed: Sequence[PackedCall]) -> list[Call]:
    """Rebuild whole calls. Bases come before the calls that build on them."""
    bases: dict[str, Ids] = {}
    routings: dict[str | None, Routing | None] = {}
    calls = []
    for item in packed:
        call_id = item.info.call_id
        prompt = rebuild(item.prompt, bases, call_id)
        bases[call_id] = np.concatenate([prompt, item.sampled_ids])
        routing = routings[call_id] = _based(item.routing, routings.get(item.prompt.base_id))
        calls.append(Call(item.info, prompt, item.sampled_ids, item.logprobs, item.spans, routing))
    return calls


def new_routing(routed: Experts, prompt: Delta, base: Sequence[int] | None) -> Routing:
    """Of what a call recorded, what its prompt's base has not: the base's last token may be among it. `base` are layers
    and experts of the base's routing, None where it has none."""
    start = max(0, prompt.keep - 1) if base is not None and routed.shape[1:] == tuple(base) else 0
    return Routing(start, routed[start:])


def _based(routing: Routing | None, base: Routing | None) -> Routing | None:
    if routing is None or not routing.start:
        return routing
    same = base is not None and base.tail.shape[1:] == routing.tail.shape[1:]
    return replace(routing, base=base) if same else None


def routing_out(routing: Routing) -> tuple[list[int], bytes]:
    """Its shape, and its experts as raw little-endian bytes."""
    return [routing.start, *routing.tail.shape[1:], routing.tail.itemsize], routing.tail.tobytes()


def routing_in(shape: Sequence[int], experts: bytes) -> Routing:
    """Inverse of `routing_out`."""
    start, layers, chosen, size_bytes = shape
    flat: Experts = np.frombuffer(experts, np.uint8 if size_bytes == 1 else np.int16)
    return Routing(start, flat.reshape(-1, layers, chosen))


def _spans_out(spans: tuple[VersionSpan, ...]) -> list[list[int]]:
    return [[s.start, s.end, *s.version] for s in spans]


def _spans_in(rows: list[list[int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(start, end, PolicyVersion(epoch, updates)) for start, end, epoch, updates in rows)


def encode(
    rollout_id: str,
    attempt_id: str,
    packed: Sequence[PackedCall],
    *,
    reward: float | None,
    incomplete: Sequence[str] = (),
) -> bytes:
    """The binary export: MessagePack of a header and one map a call; arrays are raw little-endian bytes."""
    rows = [
        {
            "info": asdict(item.info),
            "prompt": [item.prompt.base_id, item.prompt.keep, item.prompt.tail.tobytes(), item.prompt.digest],
            "sampled": item.sampled_ids.tobytes(),
            "logprobs": item.logprobs.tobytes(),
            "spans": _spans_out(item.spans),
        }
        | ({"routing": routing_out(item.routing)} if item.routing else {})
        for item in packed
    ]
    header: dict[str, Any] = {
        "v": WIRE_VERSION,
        "rollout_id": rollout_id,
        "attempt_id": attempt_id,
        "reward": reward,
        "incomplete": list(incomplete),
        "calls": rows,
    }
    return bytes(msgpack.packb(header))


def decode(body: bytes) -> RolloutCalls:
    """Inverse of `encode`, with whole calls."""
    raw = msgpack.unpackb(body)
    if raw.get("v") != WIRE_VERSION:
        raise StoreError(f"Calls came in wire version {raw.get('v')}; this agl reads {WIRE_VERSION}.", "Upgrade agl.")
    packed = [
        PackedCall(
            CallInfo(**row["info"]),
            Delta(row["prompt"][0], row["prompt"][1], np.frombuffer(row["prompt"][2], np.int32), row["prompt"][3]),
            np.frombuffer(row["sampled"], np.int32),
            np.frombuffer(row["logprobs"], np.float32),
            _spans_in(row["spans"]),
            routing_in(*row["routing"]) if "routing" in row else None,
        )
        for row in raw["calls"]
    ]
    return RolloutCalls(
        raw["rollout_id"], raw["attempt_id"], tuple(unpack(packed)), raw["reward"], tuple(raw["incomplete"])
    )
