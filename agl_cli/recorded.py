"""What was recorded of a rollout, gathered from the gateway and put in order for reading and export.

`Recorded` holds a rollout with its last attempt's events and calls and the samples that training would build from them.
All else here is a pure function of it.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agl_cli import continuity
from agl_cli.continuity import NOBODY, Continuity, Origin, main_names, measure, origin_of
from agl_cli.history import Message, asked, conversation, judged, text_of
from agl_runtime.calls import Call, CallInfo, RolloutCalls
from agl_runtime.client import GatewayClient
from agl_runtime.config import Project
from agl_runtime.errors import ConfigError
from agl_runtime.samples.build import build_samples
from agl_runtime.samples.diagnose import Decode
from agl_runtime.samples.types import Limits, RolloutSamples
from agl_runtime.schemas import Event, Rollout, RolloutState
from agl_runtime.trainer.state import newest_checkpoint

FETCHES = 8
MODEL_REQUEST, REWARD, AGENT_EXIT = "model_request", "reward", "agent_exit"
SHOWN_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rollouts are meant; None means any."""

    states: Sequence[RolloutState] = tuple(RolloutState)
    mode: str | None = None
    step: int | None = None

    def __contains__(self, rollout: Rollout) -> bool:
        return self.mode in (None, rollout.mode) and self.step in (None, _extra(rollout, "step"))


@dataclass(frozen=True, slots=True)
class Recorded:
    rollout: Rollout
    attempts: tuple[str, ...]
    events: tuple[Event, ...]
    calls: RolloutCalls
    samples: RolloutSamples
    origin: Origin = NOBODY

    @property
    def requests(self) -> dict[str, Mapping[str, Any]]:
        """Request, response and the like of each committed call, by its id, in order of answer."""
        return _requests(self.events)

    def last(self, event_type: str) -> dict[str, Any]:
        """The data of the newest event of a type; empty without one."""
        return next((event.data for event in reversed(self.events) if event.event_type == event_type), {})

    @property
    def main(self) -> dict[str, CallInfo]:
        """The calls that are no side jobs, by their ids, in order of answer."""
        known = {call.info.call_id: call.info for call in self.calls.calls if call.info.kind == "main"}
        return {call_id: known[call_id] for call_id in self.requests if call_id in known}

    @property
    def leaves(self) -> list[str]:
        """The calls in which conversations ended: the last call of each sample. Without samples, the main calls with an
        answer that no later one goes on from; where none has an answer, the last main call, else the last side job."""
        ends = [sample.call_ids[-1] for sample in self.samples.samples]
        main, requests = self.main, self.requests
        answered = {call_id: requests[call_id] for call_id, info in main.items() if info.http_status == 200}
        return ends or _ends(answered) or list(main or requests)[-1:]


def _requests(events: Iterable[Event]) -> dict[str, Mapping[str, Any]]:
    return {event.data["call_id"]: event.data for event in events if event.event_type == MODEL_REQUEST}


def _ends(requests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of answered calls in order, those whose messages no later one begins with."""
    ends: dict[str, list[Message]] = {}
    for call_id in reversed(list(requests)):
        messages = asked(requests[call_id])["messages"]
        if not any(len(later) > len(messages) and later[: len(messages)] == messages for later in ends.values()):
            ends[call_id] = messages
    return list(ends)[::-1]


async def find(client: GatewayClient, wanted: Filter, most: int) -> list[Rollout]:
    """The newest rollouts that are meant, oldest first."""
    found = [rollout for rollout in await client.rollouts(wanted.states, limit=10**9) if rollout in wanted]
    return found[-most:] if most else found


async def fetch(client: GatewayClient, rollout_id: str, project: Project) -> Recorded:
    """Raises NotFoundError."""
    detail = await client.rollout(rollout_id)
    events, calls = await client.events(rollout_id), await client.calls(rollout_id)
    samples = build_samples(calls, _limits(project))
    return Recorded(detail.rollout, tuple(detail.attempts), tuple(events), calls, samples, origin_of(project))


def diagnosed(item: Recorded, project: Project) -> Recorded:
    """With the cause of each break between samples, where there is one and the policy's tokenizer is at hand."""
    decode = _decoder(project) if item.samples.report.splits else None
    if decode is None:
        return item
    return replace(item, samples=judged(build_samples(item.calls, _limits(project), decode), item.requests))


def _limits(project: Project) -> Limits:
    return Limits(project.config.train.max_prompt_tokens, project.config.train.max_response_tokens)


def _decoder(project: Project) -> Decode | None:
    """Text of token ids. Raises ConfigError for a tokenizer that does not load."""
    newest, base = newest_checkpoint(project.state_dir), project.config.model.path
    folder = newest.folder if newest else project.path(base) if base else project.root
    file = folder / "tokenizer.json"
    if not file.is_file() or importlib.util.find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(f"{file} is no tokenizer: {error}.", "Fetch or save the model again.") from error
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


async def recent(client: GatewayClient, project: Project, most: int) -> Continuity:
    """What the newest training rollouts that ended became, with the cause of each break."""
    decode, limits = _decoder(project), _limits(project)
    ended = await find(client, Filter((RolloutState.SUCCEEDED, RolloutState.FAILED), "train"), most)
    built, names = [], set[str]()
    for rollout in ended:
        calls = await client.calls(rollout.rollout_id)
        samples = build_samples(calls, limits, decode)
        if "template" in samples.report.splits:
            samples = judged(samples, _requests(await client.events(rollout.rollout_id, event_type=MODEL_REQUEST)))
        built.append(samples)
        names |= main_names((call.info for call in calls.calls), origin_of(project))
    return measure(built, names)


async def rewards(client: GatewayClient, rollouts: Iterable[Rollout]) -> list[float | None]:
    """The reward of each, in their order."""
    gate = asyncio.Semaphore(FETCHES)

    async def one(rollout: Rollout) -> float | None:
        async with gate:
            events = await client.events(rollout.rollout_id, event_type=REWARD)
        return events[-1].data.get("value") if events else None

    return list(await asyncio.gather(*(one(rollout) for rollout in rollouts)))


def row(rollout: Rollout, reward: float | None) -> dict[str, Any]:
    """A rollout in one line."""
    return {
        "rollout_id": rollout.rollout_id,
        "state": rollout.status.state.value,
        "mode": rollout.mode,
        "step": _extra(rollout, "step"),
        "task_id": _extra(rollout, "task_id"),
        "reward": reward,
        "error": rollout.status.error_message,
    }


def _extra(rollout: Rollout, name: str) -> Any:
    return (rollout.metadata.model_extra or {}).get(name)


def as_json(item: Recorded) -> dict[str, Any]:
    given, report = item.last(REWARD), item.samples.report
    return {
        **row(item.rollout, given.get("value")),
        "reward_parts": given.get("parts") or {},
        "attempts": list(item.attempts),
        "task": item.rollout.input,
        "agent": item.last(AGENT_EXIT),
        "calls": [_call(call, item.requests.get(call.info.call_id, {})) for call in item.calls.calls],
        "incomplete_calls": list(item.calls.incomplete),
        "samples": [
            {
                "tokens": int(sample.ids.size),
                "trained_tokens": int(sample.mask.sum()),
                "calls": list(sample.call_ids),
                "split": sample.split,
                "truncated": sample.truncated,
                "broke": asdict(sample.broke) if sample.broke else None,
            }
            for sample in item.samples.samples
        ],
        "report": asdict(report),
        "continuity": continuity.as_json(item.samples, item.origin, [call.info for call in item.calls.calls]),
        "conversations": [conversation(item.requests[leaf])["messages"] for leaf in item.leaves],
    }


def _call(call: Call, request: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "call_id": call.info.call_id,
        "model": call.info.model,
        "kind": call.info.kind,
        "prompt_tokens": int(call.prompt_ids.size),
        "sampled_tokens": int(call.sampled_ids.size),
        "versions": [str(span.version) for span in call.spans],
        "trainable": call.info.trainable,
        "reason": call.info.reason,
        "finish_reason": call.info.finish_reason,
        "http_status": call.info.http_status,
        "latency_ms": request.get("latency_ms"),
        "error": _error(request),
    }


def _error(request: Mapping[str, Any]) -> str | None:
    """The first line of what the agent was told instead of an answer."""
    error = (request.get("response") or {}).get("error")
    lines = str(error.get("message") or "").splitlines() if isinstance(error, dict) else []
    return lines[0] if lines else None


def raw_row(item: Recorded) -> dict[str, Any]:
    """Everything that was recorded of a rollout's last attempt; model calls are `model_request` events."""
    return {
        "rollout": item.rollout.model_dump(mode="json"),
        "attempts": list(item.attempts),
        "reward": item.calls.reward,
        "events": [event.model_dump(mode="json") for event in item.events],
    }


def sft_rows(item: Recorded) -> Iterator[dict[str, Any]]:
    """A row of supervised data for each conversation of a rollout that ends in an answer; side jobs are none."""
    rows = (conversation(item.requests[leaf]) for leaf in item.leaves if leaf in item.main)
    return (row for row in rows if row["messages"][-1].get("role") == "assistant")


def message_lines(message: Message) -> Iterator[str]:
    """A message for reading: its role and text, then its tool calls; a long text is cut."""
    text = text_of(message.get("content"))
    cut = len(text) - SHOWN_CHARS
    if text or not message.get("tool_calls"):
        yield f"{message.get('role', '?')}: {text[:SHOWN_CHARS]}{f' … ({cut} more characters)' if cut > 0 else ''}"
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield f"{message.get('role', '?')} calls {function.get('name')}({function.get('arguments', '')})"
