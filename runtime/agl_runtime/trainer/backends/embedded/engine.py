"""Continuous batching: one thread that decodes all live generations together.

Invariants:
- The engine's thread is the only one that runs the model, for decoding and (through `call`) for updates and saving, so
  a pause is simply the time that such a job takes between two steps.
- Generations are admitted in the order in which they came. Each step reads at most `prefill_tokens` of waiting prompts
  and then gives every admitted generation exactly one token, so none starves.
- A cancelled generation is gone after the step that runs when it is cancelled.
- A token's version names the weights that computed its logits. `replace_version` sends generations in flight back to
  be read again under the new weights: no key or value of old weights outlives them.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import torch

from agl_runtime.calls import VersionSpan
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.embedded.batch import Batch, Prefill
from agl_runtime.trainer.backends.embedded.policy import Policy
from agl_runtime.trainer.backends.embedded.sampling import SamplingParams, TopLogProbs, draw

logger = logging.getLogger(__name__)

Finish = Literal["stop", "length", "error"]
T = TypeVar("T")


class Signal(Protocol):
    def set(self) -> None: ...


@dataclass(eq=False, slots=True)
class Generation:
    """One sequence to sample. The engine's thread writes its result fields; any thread may read them, or cancel it.

    `prompt` is not empty and leaves room for `params.max_tokens` in the policy's context. `is_last` is told every
    sampled id and says whether the answer ends with it (a stop string); it runs on the engine's thread. `changed` is
    set when the generation has finished and, if `live`, after each token. An id is readable after all else about it.
    """

    prompt: Sequence[int]
    params: SamplingParams
    changed: Signal
    seed: str | None = None
    live: bool = False
    is_last: Callable[[int], bool] | None = None
    cancelled: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[TopLogProbs] = field(default_factory=list)
    finish: Finish | None = None
    _starts: list[tuple[int, PolicyVersion]] = field(default_factory=list)
    _random: random.Random | None = None

    def spans(self) -> list[VersionSpan]:
        """Which version sampled which of `ids`."""
        ends = [start for start, _ in self._starts[1:]] + [len(self.ids)]
        return [VersionSpan(start, end, version) for (start, version), end in zip(self._starts, ends, strict=True)]

    def _accept(self, token_id: int, logprob: float, top: TopLogProbs, version: PolicyVersion) -> None:
        if not self._starts or self._starts[-1][1] != version:
            self._starts.append((len(self.ids), version))
        self.logprobs.append(logprob)
        self.tops.append(top)
        self.ids.append(token_id)

    def _uniform(self, seeds: random.Random) -> float:
        if self._random is None:
            self._random = random.Random(self.seed if self.seed is not None else seeds.getrandbits(64))
        return self._random.random()


class Engine:
    """`notify` gets, after each step, the signals to set; by default they are set on the engine's thread.

    `seeds` gives a random stream to each generation that brings no seed. Only the engine's thread uses it.
    """

    def __init__(
        self,
        policy: Policy,
        version: PolicyVersion,
        *,
        max_batch: int = 64,
        prefill_tokens: int = 2048,
        seeds: random.Random | None = None,
        notify: Callable[[list[Signal]], None] | None = None,
    ) -> None:
        self._policy = policy
        self._version = version
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._notify = notify or set_signals
        self.seeds = seeds or random.Random()
        self._inbox: queue.SimpleQueue[Generation | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Generation] = deque()
        self._reading: list[Generation] = []
        self._prefill: Prefill | None = None
        self._active: list[Generation] = []
        self._batch: Batch | None = None
        self._signals: list[Signal] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def version(self) -> PolicyVersion:
        return self._version

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what is unfinished finishes with "error". Nothing may be submitted afterwards."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, generation: Generation) -> None:
        self._inbox.put(generation)

    def call(self, job: Callable[[], T]) -> Future[T]:
        """Run `job` on the engine's thread between two steps, with decoding paused meanwhile."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job())
            except BaseException as error:  # carried to whoever waits for the future
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def replace_version(self, version: PolicyVersion) -> None:
        """The weights have changed. Only for jobs of `call`."""
        self._version = version
        self._waiting.extendleft(reversed(self._active + self._reading))
        self._forget()

    def _forget(self) -> None:
        self._active, self._reading = [], []
        self._batch = self._prefill = None

    def _run(self) -> None:
        while self._take_inbox():
            try:
                self._step()
            except Exception:  # top of the loop: these generations fail, later ones may not
                logger.exception("decoding step failed; %d generations end", len(self._active + self._reading))
                self._fail(self._active + self._reading)
                self._forget()
            self._send_signals()
        self._fail([*self._active, *self._reading, *self._waiting])
        self._send_signals()

    def _take_inbox(self) -> bool:
        """Handle all that has come in, waiting only when there is nothing to decode; False when told to stop."""
        while True:
            try:
                item = self._inbox.get(block=not (self._waiting or self._reading or self._active))
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, Generation):
                self._waiting.append(item)
            else:
                item()

    def _fail(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            self._end(generation, "error")

    def _end(self, generation: Generation, finish: Finish) -> None:
        generation.finish = finish
        self._signals.append(generation.changed)

    def _send_signals(self) -> None:
        if self._signals:
            signals, self._signals = self._signals, []
            self._notify(signals)

    @torch.inference_mode()
    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        self._read()
        if self._batch is not None:
            self._sample(self._batch)

    def _drop_cancelled(self) -> None:
        self._waiting = deque(g for g in self._waiting if not g.cancelled)
        if any(g.cancelled for g in self._reading):
            keep = [i for i, g in enumerate(self._reading) if not g.cancelled]
            self._reading = [self._reading[i] for i in keep]
            self._prefill = _kept(self._prefill, keep)
        self._retain([i for i, g in enumerate(self._active) if not g.cancelled])

    def _retain(self, keep: list[int]) -> None:
        if len(keep) < len(self._active):
            self._active = [self._active[i] for i in keep]
            self._batch = _kept(self._batch, keep)

    def _admit(self) -> None:
        """Begin to read the oldest waiting prompts, as many as fit into one step (one at least)."""
        if self._reading:
            return
        widest = 0
        while self._waiting and len(self._active) + len(self._reading) < self._max_batch:
            oldest = self._waiting[0]
            widest = max(widest, len(oldest.prompt) + len(oldest.ids))
            if self._reading and widest * (len(self._reading) + 1) > self._prefill_tokens:
                break
            self._reading.append(self._waiting.popleft())
        if self._reading:
            self._prefill = Prefill(self._policy, [[*g.prompt, *g.ids] for g in self._reading])

    def _read(self) -> None:
        if self._prefill is None or not self._prefill.advance(self._prefill_tokens):
            return
        if self._batch is None:
            self._batch = self._prefill.batch
        else:
            self._batch.join(self._prefill.batch)
        self._active += self._reading
        self._prefill, self._reading = None, []

    def _sample(self, batch: Batch) -> None:
        active = self._active
        uniforms = [g._uniform(self.seeds) for g in active]
        result = draw(batch.logits, [g.params for g in active], uniforms)
        tokens = zip(result.ids, result.logprobs, result.tops, strict=True)
        for generation, (token_id, logprob, top) in zip(active, tokens, strict=True):
            generation._accept(token_id, logprob, top, self._version)
            self._finish_or_signal(generation)
        self._retain([i for i, g in enumerate(active) if g.finish is None])
        if self._active and self._batch is not None:
            self._batch.decode([g.ids[-1] for g in self._active])

    def _finish_or_signal(self, generation: Generation) -> None:
        last = generation.ids[-1]
        if last in self._policy.stop_ids or (generation.is_last and generation.is_last(last)):
            self._end(generation, "stop")
        elif len(generation.ids) >= generation.params.max_tokens:
            self._end(generation, "length")
        elif generation.live:
            self._signals.append(generation.changed)


K = TypeVar("K", Batch, Prefill)


def _kept(rows: K | None, keep: Sequence[int]) -> K | None:
    if rows is None or not keep:
        return None
    rows.keep(keep)
    return rows


def set_signals(signals: list[Signal]) -> None:
    for signal in signals:
        signal.set()
