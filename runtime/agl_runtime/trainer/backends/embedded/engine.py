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
from typing import TypeVar

import torch

from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.embedded.batch import Batch
from agl_runtime.trainer.backends.embedded.generation import Finish, Generation, Signal
from agl_runtime.trainer.backends.embedded.policy import Policy
from agl_runtime.trainer.backends.embedded.sampling import draw

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        prefill_tokens: int = 512,
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
        self._reading = self._decoding = Batch(policy, [])
        self._signals: list[Signal] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def version(self) -> PolicyVersion:
        return self._version

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Finish all generations, those that are yet to be submitted too, with "error"."""
        self.call(self._close).result()

    def stop(self) -> None:
        """Close, and end the thread. Nothing may be submitted afterwards."""
        self.close()
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
        self._waiting.extendleft(reversed(self._take_rows()))

    def _take_rows(self) -> list[Generation]:
        """All admitted generations; their keys and values are forgotten."""
        rows = self._decoding.rows + self._reading.rows
        self._reading = self._decoding = Batch(self._policy, [])
        return rows

    def _run(self) -> None:
        while self._take_inbox():
            try:
                self._step()
            except Exception:  # top of the loop: these generations fail, later ones may not
                failed = self._take_rows()
                logger.exception("decoding step failed; %d generations end", len(failed))
                self._fail(failed)
            self._send_signals()

    def _take_inbox(self) -> bool:
        """Handle all that has come in, waiting only when there is nothing to decode; False when told to stop."""
        while True:
            try:
                item = self._inbox.get(block=not (self._waiting or self._reading.rows or self._decoding.rows))
            except queue.Empty:
                return True
            if item is None:
                return False
            if not isinstance(item, Generation):
                item()
            elif self._closed:
                self._fail([item])
            else:
                self._waiting.append(item)
            self._send_signals()

    def _close(self) -> None:
        self._closed = True
        self._fail([*self._take_rows(), *self._waiting])
        self._waiting.clear()

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
        self._waiting = deque(row for row in self._waiting if not row.cancelled)
        for batch in (self._reading, self._decoding):
            batch.keep(lambda row: not row.cancelled)
        if not self._reading.rows:
            self._reading = Batch(self._policy, self._admit())
        if self._reading.rows and self._reading.read(self._prefill_tokens):
            self._decoding = self._decoding.joined(self._reading)
            self._reading = Batch(self._policy, [])
        if self._decoding.rows:
            self._sample(self._decoding)

    def _admit(self) -> list[Generation]:
        """The oldest waiting generations, as many as can be read in one step, but at least one."""
        admitted: list[Generation] = []
        widest = 0
        while self._waiting and len(self._decoding.rows) + len(admitted) < self._max_batch:
            oldest = self._waiting[0]
            widest = max(widest, len(oldest.prompt) + len(oldest.tokens))
            if admitted and widest * (len(admitted) + 1) > self._prefill_tokens:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _sample(self, batch: Batch) -> None:
        uniforms = [row.uniform(self.seeds) for row in batch.rows]
        tokens = draw(batch.logits, [row.params for row in batch.rows], uniforms)
        for row, token in zip(batch.rows, tokens, strict=True):
            row.accept(token, self._version)
            self._finish_or_signal(row, token.id)
        batch.keep(lambda row: row.finish is None)
        if batch.rows:
            batch.decode()

    def _finish_or_signal(self, row: Generation, last: int) -> None:
        if last in self._policy.stop_ids or (row.is_last and row.is_last(last)):
            self._end(row, "stop")
        elif len(row.tokens) >= row.params.max_tokens:
            self._end(row, "length")
        elif row.live:
            self._signals.append(row.changed)


def set_signals(signals: list[Signal]) -> None:
    for signal in signals:
        signal.set()
