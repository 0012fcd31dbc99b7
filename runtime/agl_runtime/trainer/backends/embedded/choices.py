"""What a generation says, read as it grows or all at once: the same reader serves streamed and whole answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.generation import Generation, Signal
from agl_runtime.trainer.backends.embedded.requests import Order
from agl_runtime.trainer.backends.embedded.sampling import Token
from agl_runtime.trainer.backends.embedded.text import StopFilter
from agl_runtime.trainer.backends.embedded.tools import Piece, ToolCall, ToolReader


@dataclass(frozen=True, slots=True)
class News:
    """What came since the last reading: sampled tokens, text and calls. `finish_reason` is set in the last one: "stop",
    "length" or "tool_calls"; "error" when the engine failed. `stop` is the stop string that ended the text."""

    tokens: list[Token]
    pieces: list[Piece]
    finish_reason: str | None
    stop: str | None


class Choice:
    """One answer of an order. `index` is its place among them, `prompt` its prompt's."""

    def __init__(self, codec: Codec, order: Order, index: int, changed: Signal) -> None:
        self.index = index
        prompt, turn = divmod(index, order.n)
        self.generation = Generation(
            prompt=order.prompts[prompt],
            params=order.params[prompt],
            changed=changed,
            seed=None if order.seed is None else f"{order.seed}/{turn}",
            live=order.stream,
            is_last=_watch(codec, order),
        )
        self.ended = False
        self._codec = codec
        self._text = codec.detokenizer()
        self._stops = StopFilter(order.stops, order.closers)
        self._tools = ToolReader() if order.tools else None
        self._read = 0
        self._called = False

    def read(self) -> News | None:
        """None when there is nothing new. After the last one, `ended` is True."""
        finish = self.generation.finish  # read first: when it is set, all tokens are there
        tokens = self.generation.tokens[self._read :]
        if self.ended or (not tokens and finish is None):
            return None
        self._read += len(tokens)
        text = self._stops.push(self._text.push(self._codec.visible(token.id for token in tokens)))
        if finish is not None:
            self.ended = True
            text += self._stops.push(self._text.finish()) + self._stops.finish()
        pieces = self._pieces(text)
        self._called = self._called or any(isinstance(piece, ToolCall) for piece in pieces)
        reason = "tool_calls" if finish == "stop" and self._called else finish
        return News(tokens, pieces, reason, self._stops.cut_at)

    def _pieces(self, text: str) -> list[Piece]:
        if self._tools is None:
            return [text] if text else []
        pieces = self._tools.push(text)
        return pieces + self._tools.finish() if self.ended else pieces


def _watch(codec: Codec, order: Order) -> Callable[[int], bool] | None:
    """Tells the engine which sampled id completes a stop string."""
    if not order.stops and not order.closers:
        return None
    text, stops = codec.detokenizer(), StopFilter(order.stops, order.closers)

    def is_last(token_id: int) -> bool:
        stops.push(text.push(codec.visible([token_id])))
        return stops.hit

    return is_last
