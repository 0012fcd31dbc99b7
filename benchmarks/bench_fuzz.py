"""Requests at random in their thousands, to a gateway whose model server misbehaves at random as well.

- Model calls: near-good bodies of every dialect (hypothesis), some of them sent again with the mark of a retry, some by
  clients that leave. What the model server does to each is drawn from the call's own number, which travels as its token
  limit, so that every record can be held against it: a call is trainable only where that was a whole and true answer,
  with exactly its ids; every such answer that was read is on record once; every other call has a reason.
- Everything else: what the OpenAPI document says may be sent (schemathesis), answered as the document says.

Counts answers by status. Fails on a 5xx without a fault of the model server, an error that is not in its dialect's
shape, a stream without an end, a wrong record, or a traceback in the gateway's log.

    python benchmarks/bench_fuzz.py [--requests 100000] [--seconds 1500] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance
from support.report import emit, table
from support.servers import Server, agl_gateway

from agl_runtime.calls import decode

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from fakes.fuzzing import BODIES, at_home, faults_of, operations
from fakes.model_server import Answer, FakeModelServer, Raw, encode, tool_call

CONTROL_SHARE = 0.2
ROUND = 1000
DRAW = 100
ROLLOUTS = 20  # of each round
AT_ONCE = 32
PATIENCE_S = 30.0
LEAVES, AGAIN = 0.03, 0.05
FIRST_NUMBER = 1000  # below are the token limits that bodies bring themselves
ENDS = (b"data: [DONE]", b"event: response.completed", b"event: response.incomplete", b"event: message_stop")
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]
# Why a true and whole answer is not trained on.
UNWANTED = {"multiple_choices", "distribution_changed", "auxiliary", "undelivered", "superseded", "cut"}
GOOD = (
    Answer("fine"),
    Answer("thought", reasoning="hm\n"),
    Answer("", tool_calls=[tool_call("f", {"a": 1}, "c1"), tool_call("g", {}, "")]),
    Answer("half", finish_reason="length"),
)
CUT = Answer(fault="cut")  # where it is streamed
TRUE = (*GOOD, CUT)
BROKEN = (
    *(Answer(fault=fault) for fault in ("drop", "garbage", "list", "empty")),
    CUT,
    *(Answer(status=status) for status in (401, 404, 500, 503)),
    Answer("x", finish_reason="abort"),
)
REFUSING = (Answer(status=400), Answer(status=422, error={"detail": "no"}), Answer(status=429))
FLAWED = (
    *(Answer("flaw", ids=how) for how in ("null", "absent", "empty", "short")),
    *(Answer("flaw", prompt_ids=how) for how in ("null", "absent", "empty")),
    *(Answer("flaw", logprobs=how) for how in ("absent", "short", "nan")),
    Answer("flaw", model="another"),
    Answer("flaw", versions=[{"version": "0.0", "start": 0, "end": 1}]),
    Answer(""),
)


def planned(number: int) -> tuple[Answer, ...]:
    """What the model server does to the first and the later tries of a call."""
    chance = random.Random(number)
    good = chance.choice(GOOD)
    dice = chance.random()
    if dice < 0.7:
        return (good,)
    if dice < 0.74:
        return (chance.choice((Answer(status=500), Answer(fault="drop"))), good)
    return (chance.choice((*BROKEN, *REFUSING, *FLAWED)),)


def sampled(answer: Answer) -> list[int]:
    """The ids that the model server says it sampled."""
    calls = [call["function"] for call in answer.tool_calls]
    return encode(answer.text + "".join(f"<call>{call['name']} {call['arguments']}" for call in calls) + "</>")


@dataclass(frozen=True, slots=True)
class Asked:
    """A model call; `number` is 0 where its body has no place for one."""

    path: str
    body: Any
    number: int
    leaves_after_s: float | None = None
    is_again: bool = False


@dataclass
class Outcome:
    statuses: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    records: Counter[str] = field(default_factory=Counter)

    @property
    def sent(self) -> int:
        return sum(self.statuses.values())


class Misbehaving:
    """The model server's script."""

    def __init__(self) -> None:
        self._tries: Counter[int] = Counter()

    def __call__(self, body: Raw) -> Answer:
        number = body.get("max_tokens")
        if type(number) is not int or number < FIRST_NUMBER:
            return Answer("fine")
        self._tries[number] += 1
        plan = planned(number)
        return plan[min(self._tries[number], len(plan)) - 1]


def drawing(count: int) -> settings:
    checks = list(HealthCheck)
    return settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=checks
    )


def drawn(count: int, first: int) -> list[Asked]:
    """So many model calls, whose numbers begin with `first`."""
    found: list[Asked] = []

    @drawing(count)
    @seed(first)
    @given(call=st.one_of(*(st.tuples(st.just(path), body) for path, body in BODIES.items())))
    def draw(call: tuple[str, Any]) -> None:
        path, body = call
        number, chance = 0, random.Random(first + len(found))
        if isinstance(body, dict):
            number = first + len(found)
            body = {**body, "max_output_tokens" if path.endswith("responses") else "max_tokens": number}
        leaves = chance.uniform(0, 0.02) if chance.random() < LEAVES else None
        found.append(Asked(path, body, number, leaves, chance.random() < AGAIN))

    draw()
    return found


class Round:
    """Sends model calls and holds what comes back, and what is on record then, against what was planned."""

    def __init__(self, server: Server, outcome: Outcome) -> None:
        self._server = server
        self._outcome = outcome
        self._whole: set[int] = set()  # numbers of the calls that were answered to their good end

    async def send(self, calls: list[Asked]) -> None:
        names = self._server.add_rollouts(ROLLOUTS)
        self._whole.clear()
        gate = asyncio.Semaphore(AT_ONCE)
        patience = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(headers={"x-api-key": self._server.key}, timeout=patience) as http:

            async def one(place: int, asked: Asked) -> None:
                async with gate:
                    await self._ask(http, names[place % ROLLOUTS], asked)

            await asyncio.gather(*(one(place, asked) for place, asked in enumerate(calls)))
            for name in names:
                await self._check_record(http, name, {asked.number: asked for asked in calls if asked.number})

    async def _ask(self, http: aiohttp.ClientSession, name: str, asked: Asked) -> None:
        url = f"{self._server.url}/proxy/rollout/{name}/attempt/0/mode/train/{asked.path}"
        data = orjson.dumps(asked.body)
        for mark in ("0", "1") if asked.is_again else ("0",):
            headers = {"x-stainless-retry-count": mark}
            try:
                async with asyncio.timeout(asked.leaves_after_s), http.post(url, data=data, headers=headers) as reply:
                    content = await reply.read()
            except TimeoutError:
                self._outcome.statuses["left"] += 1
                if asked.leaves_after_s is None:
                    self._outcome.violations.append(f"no answer within {PATIENCE_S} s: {asked.path} {data[:600]!r}")
                continue
            self._outcome.statuses[str(reply.status)] += 1
            if wrong := self._judge(asked, reply.status, reply.content_type, content):
                told = f"{wrong}: {asked.path} {data[:600]!r} -> {reply.status} {content[-300:]!r}"
                self._outcome.violations.append(told)

    def _judge(self, asked: Asked, status: int, kind: str, content: bytes) -> str | None:
        """What is wrong with an answer; None for nothing."""
        is_fault = planned(asked.number)[-1] in BROKEN if asked.number else False
        if status >= 500 and not is_fault:
            return "a server error without a fault of the model server"
        if b"The gateway failed" in content:
            return "a fault of the gateway"
        if kind == "text/event-stream":
            has_ended = any(end in content for end in ENDS)
            if has_ended and asked.number:
                self._whole.add(asked.number)
            return None if has_ended or b'"error"' in content.rsplit(b"data: ", 1)[-1] else "a stream without an end"
        told = orjson.loads(content)
        if status == 200:
            self._whole.add(asked.number)
            return None
        error = told.get("error")
        is_shaped = isinstance(error, dict) and error.get("message") and ("message" in asked.path) == ("type" in told)
        return None if is_shaped else "an error in no shape of its dialect"

    async def _check_record(self, http: aiohttp.ClientSession, name: str, asked: dict[int, Asked]) -> None:
        async with http.post(f"{self._server.url}/api/rollouts/{name}/attempt/0/seal"):
            pass
        async with http.get(f"{self._server.url}/api/rollouts/{name}/calls") as reply:
            recorded = decode(await reply.read())
        async with http.get(f"{self._server.url}/api/rollouts/{name}/calls", params={"format": "json"}) as reply:
            numbers = {row["info"]["call_id"]: _number(row["request"]) for row in orjson.loads(await reply.read())}
        self._outcome.violations += [f"record of {name}: {fault}" for fault in faults_of(recorded)]
        trained = Counter(numbers[call.info.call_id] for call in recorded.calls if call.info.trainable)
        for call in recorded.calls:
            info, number = call.info, numbers[call.info.call_id]
            self._outcome.records[info.reason or "trainable"] += 1
            answer = planned(number)[-1] if number >= FIRST_NUMBER else Answer("fine")
            is_true = answer in TRUE or number < FIRST_NUMBER
            if info.trainable and not (is_true and call.sampled_ids.tolist() == sampled(answer)):
                self._outcome.violations.append(f"{info.call_id} of {name} is trainable with {answer}")
            if number in self._whole and is_true and not info.trainable and info.reason not in UNWANTED:
                self._outcome.violations.append(f"{info.call_id} of {name} is {info.reason} with {answer}")
        twice = [number for number, count in trained.items() if number in asked and count > 1]
        self._outcome.violations += [f"call {number} of {name} is trained {trained[number]} times" for number in twice]


def _number(request: Raw) -> int:
    found = request.get("max_output_tokens", request.get("max_tokens"))
    return found if type(found) is int else 0


def model_calls(server: Server, outcome: Outcome, count: int, first: int, stop_at: float) -> None:
    """`count` calls or more, in rounds."""
    one_round = Round(server, outcome)
    while outcome.sent < count and time.monotonic() < stop_at:
        calls: list[Asked] = []
        while len(calls) < min(
            ROUND, count
        ):  # in short draws: hypothesis looks ever longer for what it has not drawn yet
            calls += drawn(DRAW, first + len(calls))
        first += len(calls)
        asyncio.run(one_round.send(calls))


def everything(server: Server, endpoint: str, outcome: Outcome, count: int, first: int, stop_at: float) -> None:
    """`count` requests or more made out of the document, in equal parts for every operation."""
    found = operations()
    called = {"headers": {"x-api-key": server.key}, "base_url": server.url, "timeout": 60}
    with requests.Session() as session:

        def all_of(operation: Any, rollout_id: str) -> None:
            @drawing(max(1, count // len(found) // 4))
            @seed(first)
            @given(case=operation.as_strategy())
            def ask(case: Any) -> None:
                at_home(case, endpoint, rollout_id=rollout_id, attempt_id="0", mode="train")
                reply = case.call(session=session, **called)
                outcome.statuses[str(reply.status_code)] += 1
                try:
                    case.validate_response(reply, checks=CHECKS)
                except FailureGroup as failures:
                    outcome.violations += [f"{operation.label}: {failure}" for failure in failures.exceptions]

            ask()

        while outcome.sent < count and time.monotonic() < stop_at:
            first += 1
            for operation in found.values():
                server.register(endpoint)
                session.post(f"{server.url}/proxy/resume", headers=called["headers"])
                all_of(operation, server.add_rollouts(1)[0])


@contextmanager
def fresh(model: FakeModelServer) -> Iterator[tuple[Server, Path]]:
    hurried = {"gateway": {"upstream_retries": 1, "hold_limit_s": 0.5}}
    with tempfile.TemporaryDirectory(prefix="agl-bench-") as name, agl_gateway(Path(name), hurried) as server:
        server.register(model.url)
        yield server, Path(name)


def tracebacks(folder: Path) -> list[str]:
    """What the gateway's log tells of faults that nobody foresaw."""
    logs = [log.read_text(errors="replace") for log in folder.glob("*.log")]
    return [text[text.index("Traceback") :][:2000] for text in logs if "Traceback" in text]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=1500.0, help="at the most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    calls, rest = Outcome(), Outcome()
    of_rest = int(args.requests * CONTROL_SHARE)
    first = FIRST_NUMBER + args.seed * 10_000_000
    with FakeModelServer(Misbehaving()) as model, fresh(model) as (server, folder):
        stop_at = began + args.seconds * (1 - CONTROL_SHARE)
        model_calls(server, calls, args.requests - of_rest, first, stop_at)
        calls.violations += tracebacks(folder)
    with FakeModelServer() as model, fresh(model) as (server, folder):
        everything(server, model.url, rest, of_rest, args.seed, began + args.seconds)
        rest.violations += tracebacks(folder)
    statuses = sorted({*calls.statuses, *rest.statuses})
    table(["status", "model calls", "all routes"], {s: (calls.statuses[s], rest.statuses[s]) for s in statuses})
    table(["recorded as", "calls"], {reason: (count,) for reason, count in calls.records.most_common()})
    violations = calls.violations + rest.violations
    for told in violations[:20]:
        print(told[:2000])
    sent = calls.sent + rest.sent
    result = {
        "requests": sent,
        "seconds": time.monotonic() - began,
        "statuses": {"model_calls": dict(calls.statuses), "all_routes": dict(rest.statuses)},
        "records": dict(calls.records),
        "violations": len(violations),
    }
    bounds = {"violations": (0, not violations), "requests": (args.requests, sent >= args.requests)}
    emit("fuzz", result, bounds)
    raise SystemExit(0 if not violations and sent >= args.requests else 1)


if __name__ == "__main__":
    main()
