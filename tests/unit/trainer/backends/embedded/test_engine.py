from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.embedded.engine import Engine
from agl_runtime.trainer.backends.embedded.generation import Generation
from agl_runtime.trainer.backends.embedded.policy import Policy
from agl_runtime.trainer.backends.embedded.sampling import SamplingParams

PATIENCE_S = 30
FIRST = PolicyVersion(4, 7)


@dataclass(frozen=True)
class Watched(Policy):
    """Notes the shape of every forward pass; fails when a prompt of two or more tokens holds the token 300. Where that
    token was sampled it comes alone and does no harm."""

    shapes: list[tuple[int, int]] = field(default_factory=list)

    def logits(self, ids: Tensor, *args: Any, **named: Any) -> Tensor:
        self.shapes.append((ids.shape[0], ids.shape[1]))
        if ids.shape[1] > 1 and (ids == 300).any():
            raise RuntimeError("injected")
        return super().logits(ids, *args, **named)


Start = Callable[..., Engine]


@pytest.fixture
def start(endless: Policy) -> Iterator[Start]:
    """Starts engines over a policy that never ends an answer by itself, and ends them."""
    engines: list[Engine] = []

    def start(policy: Policy = endless, **settings: Any) -> Engine:
        engine = Engine(policy, FIRST, **settings)
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        engine.stop()


def generation(prompt: Sequence[int] = (5, 6, 7), *, max_tokens: int = 8, **changes: Any) -> Generation:
    own = ("seed", "live", "is_last")
    params = SamplingParams(max_tokens=max_tokens, **{k: v for k, v in changes.items() if k not in own})
    return Generation(prompt, params, threading.Event(), **{k: v for k, v in changes.items() if k in own})


def run(engine: Engine, *generations: Generation) -> None:
    for item in generations:
        engine.submit(item)
    for item in generations:
        wait(item)


def wait(item: Generation) -> None:
    assert isinstance(item.changed, threading.Event)
    assert item.changed.wait(PATIENCE_S)


def recomputed(policy: Policy, item: Generation) -> Tensor:
    """Log-probabilities of the sampled ids by one forward pass over the whole sequence, without a cache."""
    ids = torch.tensor([[*item.prompt, *item.ids]])
    with torch.no_grad():
        logits = policy.model(ids, use_cache=False).logits[0, len(item.prompt) - 1 : -1]
    logprobs = (logits / (item.params.temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(item.ids)[:, None])[:, 0]


def recorded(item: Generation) -> Tensor:
    return torch.tensor([token.logprob for token in item.tokens])


def gap(policy: Policy, item: Generation) -> float:
    return float((recomputed(policy, item) - recorded(item)).abs().max())


def crowd(count: int) -> list[Generation]:
    source = random.Random(3)
    return [
        generation(
            [source.randrange(3, 299) for _ in range(source.choice([1, 4, 30, 90]))],
            max_tokens=source.choice([1, 5, 40]),
            temperature=source.choice([1.0, 1.0, 0.6, 1.7, 0.0]),
            seed=str(index),
        )
        for index, _ in enumerate(range(count))
    ]


@pytest.mark.parametrize("settings", [{}, {"prefill_tokens": 16}, {"max_batch": 3, "prefill_tokens": 7}])
def test_recorded_logprobs_are_those_of_a_pass_over_the_whole_sequence(
    start: Start, endless: Policy, settings: dict[str, int]
) -> None:
    items = crowd(40)
    run(start(**settings), *items)
    assert max(gap(endless, item) for item in items) < 1e-4


def test_a_seeded_generation_is_the_same_alone_and_in_a_crowd(start: Start) -> None:
    alone, amid = generation(max_tokens=30, seed="s"), generation(max_tokens=30, seed="s")
    run(start(), alone)
    run(start(), *crowd(10), amid, *crowd(10))
    assert alone.ids == amid.ids


def test_unseeded_generations_differ_and_repeat_with_the_engines_seed(start: Start) -> None:
    def two(seed: int) -> list[list[int]]:
        items = [generation(max_tokens=20) for _ in range(2)]
        run(start(seeds=random.Random(seed)), *items)
        return [item.ids for item in items]

    assert two(1) == two(1)
    first, second = two(1)
    assert first != second
    assert two(2) != two(1)


def test_an_answer_ends_at_an_end_token_a_stop_or_its_limit(start: Start, endless: Policy) -> None:
    plain = generation(max_tokens=30, seed="s")
    run(start(), plain)
    assert (plain.finish, len(plain.ids)) == ("length", 30)
    place = next(i for i in range(5, 30) if plain.ids[i] not in plain.ids[:i])

    ended = generation(max_tokens=30, seed="s")
    run(start(replace(endless, stop_ids=frozenset({plain.ids[place]}))), ended)
    stopped = generation(max_tokens=30, seed="s", is_last=lambda token_id: token_id == plain.ids[place])
    run(start(), stopped)
    for item in (ended, stopped):
        assert item.finish == "stop"
        assert item.ids == plain.ids[: place + 1]


def test_more_than_fit_wait_and_all_are_served(start: Start, endless: Policy) -> None:
    watched = Watched(**vars(endless))
    items = [generation(max_tokens=3) for _ in range(23)]
    run(start(watched, max_batch=4), *items)
    assert all(len(item.ids) == 3 for item in items)
    assert max(rows for rows, _ in watched.shapes) == 4


def test_reading_a_long_prompt_is_cut_up_and_does_not_hold_up_the_others(start: Start, endless: Policy) -> None:
    watched = Watched(**vars(endless))
    engine = start(watched, prefill_tokens=16)
    long = generation(range(3, 203), max_tokens=1)

    def submit_long(_: int) -> bool:
        if not engine_was_told:
            engine_was_told.append(True)
            engine.submit(long)
        return False

    engine_was_told: list[bool] = []
    run(engine, generation(max_tokens=60, is_last=submit_long))
    wait(long)
    assert max(columns for _, columns in watched.shapes) == 16
    first = watched.shapes.index((1, 16))
    # Between two pieces of the long prompt the running generation gets its token.
    assert watched.shapes[first : first + 6] == [(1, 16), (1, 1)] * 3


def test_a_cancelled_generation_ends_at_once_and_frees_its_place(start: Start) -> None:
    engine = start(max_batch=1)
    last = {"size": 0}

    def cancel_at_five(_: int) -> bool:
        last["size"] += 1
        endless_one.cancelled = last["size"] >= 5
        return False

    endless_one = generation(max_tokens=400, is_last=cancel_at_five)
    waiting_too = generation()
    waiting_too.cancelled = True
    after = generation()
    for item in (endless_one, waiting_too, after):
        engine.submit(item)
    wait(after)
    assert (len(endless_one.ids), endless_one.finish) == (5, None)
    assert (waiting_too.ids, waiting_too.finish) == ([], None)


def test_a_cancelled_prompt_is_not_read_on(start: Start, endless: Policy) -> None:
    watched = Watched(**vars(endless))
    engine = start(watched, prefill_tokens=8)
    long = [generation(range(3, 103)) for _ in range(2)]

    def cancel(_: int) -> bool:
        long[0].cancelled = long[1].cancelled = True
        return False

    running = generation(max_tokens=20, is_last=cancel)
    run(engine, running)
    for item in long:
        engine.submit(item)
    after = generation(is_last=cancel)
    run(engine, after)
    assert all(item.ids == [] for item in long)
    assert sum(columns for rows, columns in watched.shapes if columns > 1) < 100


def perturb(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.02)


def test_a_generation_across_a_change_of_weights_has_two_spans_and_the_logprobs_of_each(
    start: Start, fresh_policy: Callable[[], Policy]
) -> None:
    policy = replace(fresh_policy(), stop_ids=frozenset())
    before = replace(fresh_policy(), stop_ids=frozenset())
    engine = start(policy)
    second = PolicyVersion(4, 8)

    def change() -> None:
        perturb(policy)
        engine.replace_version(second)

    def change_after_five(_: int) -> bool:
        if len(item.ids) == 5:
            engine.call(change)
        return False

    item = generation(range(3, 40), max_tokens=12, seed="s", is_last=change_after_five)
    others = crowd(5)
    run(engine, *others, item)
    assert [(s.start, s.end, s.version) for s in item.spans()] == [(0, 5, FIRST), (5, 12, second)]
    old, new = recomputed(before, item), recomputed(policy, item)
    told = recorded(item)
    assert float((old - told)[:5].abs().max()) < 1e-4
    assert float((new - told)[5:].abs().max()) < 1e-4
    assert float((old - new).abs().min()) > 1e-4


def test_a_finished_generation_has_one_span(start: Start) -> None:
    item = generation()
    run(start(), item)
    assert [(s.start, s.end, s.version) for s in item.spans()] == [(0, 8, FIRST)]


def test_live_generations_signal_each_token(start: Start) -> None:
    sets: list[int] = []

    class Counting(threading.Event):
        def set(self) -> None:
            sets.append(len(item.ids))
            super().set()

    item = generation(max_tokens=4, live=True)
    item.changed = Counting()
    done = generation(max_tokens=6)
    run(start(), item, done)
    assert sets == [1, 2, 3, 4]


def test_a_failing_step_ends_its_generations_and_the_engine_goes_on(
    start: Start, endless: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(Watched(**vars(endless)))
    bad, good = generation([300, 300]), generation()
    run(engine, bad)
    run(engine, good)
    assert (bad.finish, good.finish) == ("error", "length")
    assert "decoding step failed; 1 generations end" in caplog.text


def test_stopping_ends_what_is_unfinished(endless: Policy) -> None:
    engine = Engine(endless, FIRST, max_batch=1)
    begun = threading.Event()

    def tell(_: int) -> bool:
        begun.set()
        return False

    items = [generation(max_tokens=5000, is_last=tell), generation()]
    engine.start()
    for item in items:
        engine.submit(item)
    assert begun.wait(PATIENCE_S)
    engine.stop()
    assert [item.finish for item in items] == ["error", "error"]


def test_a_job_gives_its_result_or_its_error_and_runs_on_the_engines_thread(start: Start) -> None:
    engine = start()

    def fail() -> None:
        raise ValueError("from the job")

    assert engine.call(lambda: threading.current_thread().name).result(PATIENCE_S) == "engine"
    with pytest.raises(ValueError, match="from the job"):
        engine.call(fail).result(PATIENCE_S)


def test_a_job_that_is_cancelled_before_its_turn_does_not_run(start: Start) -> None:
    engine = start()
    gate, ran = threading.Event(), []
    blocked = engine.call(lambda: gate.wait(PATIENCE_S))
    skipped = engine.call(lambda: ran.append("skipped"))
    assert skipped.cancel()
    gate.set()
    assert blocked.result(PATIENCE_S)
    engine.call(lambda: ran.append("next")).result(PATIENCE_S)
    assert ran == ["next"]
