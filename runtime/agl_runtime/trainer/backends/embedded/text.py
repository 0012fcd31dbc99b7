"""Text of token ids as they come: UTF-8 that spans tokens, stop strings that span tokens.

Concatenated pieces equal the text of all ids decoded at once. Nothing is released that a later token could still change
or take back. Stop strings cut the text only: the ids that were sampled, those of the stop string included, are all
reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_UNFINISHED = "\ufffd"
_MOST_PENDING = 3
"""An unfinished UTF-8 character has at most three bytes, each of which may decode to a replacement character."""


class Detokenizer:
    """Feeds on ids, gives text; `decode` is the tokenizer's for a list of ids."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # Ids whose text may still grow, after the last ones that were settled: decoders look at their neighbours.
        self._ids: list[int] = []
        self._given = 0

    def push(self, ids: Iterable[int]) -> str:
        fresh = list(ids)
        if not fresh:
            return ""
        self._ids += fresh
        text = self._decode(self._ids)
        pending = min(len(text) - len(text.rstrip(_UNFINISHED)), _MOST_PENDING)
        piece = text[self._given : len(text) - pending]
        self._given += len(piece)
        if not pending:
            self._ids = self._ids[-1:]
            self._given = len(self._decode(self._ids))
        return piece

    def finish(self) -> str:
        """What is left: replacement characters for bytes that never became a character."""
        piece = self._decode(self._ids)[self._given :] if self._ids else ""
        self._ids, self._given = [], 0
        return piece


class StopFilter:
    """Ends a text at the first of some strings: before those in `cuts`, after those in `closers`.

    `hit` is True from the moment that one was seen; what follows is swallowed. `cut_at` is the one that cut the text.
    """

    def __init__(self, cuts: Sequence[str], closers: Sequence[str] = ()) -> None:
        self._stops = [(stop, 0) for stop in cuts] + [(stop, len(stop)) for stop in closers]
        self._held = ""
        self.hit = False
        self.cut_at: str | None = None

    def push(self, text: str) -> str:
        if self.hit or not self._stops:
            return "" if self.hit else text
        held = self._held + text
        ends = [(at, at + kept, stop) for stop, kept in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            at, end, stop = min(ends)
            self.hit, self.cut_at = True, stop if end == at else None
            return held[:end]
        keep = max(overlap(held, stop) for stop, _ in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return "" if self.hit else held


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
