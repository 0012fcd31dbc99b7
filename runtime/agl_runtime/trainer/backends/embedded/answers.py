"""The JSON of answers, whole and streamed, in the shapes of OpenAI's API.

Beside them, in vLLM's places: `prompt_token_ids` (chat: at the top of an answer or of the first chunk; completions: in
the choice), `token_ids` in the choice, and log-probabilities. The ids are all sampled ids, also those behind text that
a stop string cut off or that is still held back; so a chunk may have ids and an empty delta. Each choice, in a
stream its last chunk, has `weight_versions`: [{"version", "start", "end"}] over its sampled ids, and `stop_reason`: the
stop string that ended its text, or null.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from agl_runtime.trainer.backends.embedded.choices import Choice, News
from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.requests import Order
from agl_runtime.trainer.backends.embedded.sampling import Token
from agl_runtime.trainer.backends.embedded.tools import ToolCall

Json = dict[str, Any]


class AnswerWriter(ABC):
    """What the two kinds of answers share: the envelope, ids, log-probabilities, versions, usage."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, codec: Codec, order: Order, model: str) -> None:
        self._codec = codec
        self._order = order
        self._head = {"id": f"{self.id_prefix}{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self, read: Sequence[tuple[Choice, News]]) -> Json:
        """The answer that was not streamed; each choice was read once, at its end."""
        rows = [self._tokens(choice, news, self._said(choice, news)) for choice, news in read]
        return self._envelope(self.whole_object, rows) | {"usage": self._usage([choice for choice, _ in read])}

    def opening(self, choice: Choice) -> Json:
        """The first chunk of a choice, before any token."""
        row = {"index": choice.index, **self._opened(choice), "finish_reason": None}
        return self._envelope(self.chunk_object, [row])

    def chunk(self, choice: Choice, news: News) -> Json:
        return self._envelope(self.chunk_object, [self._tokens(choice, news, self._delta(news))])

    def usage_chunk(self, choices: Sequence[Choice]) -> Json:
        return self._envelope(self.chunk_object, []) | {"usage": self._usage(choices)}

    @abstractmethod
    def _said(self, choice: Choice, news: News) -> Json: ...

    @abstractmethod
    def _opened(self, choice: Choice) -> Json: ...

    @abstractmethod
    def _delta(self, news: News) -> Json: ...

    @abstractmethod
    def _logprobs(self, tokens: Sequence[Token]) -> Json: ...

    def _envelope(self, kind: str, rows: list[Json]) -> Json:
        return {**self._head, "object": kind, "choices": rows}

    def _tokens(self, choice: Choice, news: News, said: Json) -> Json:
        row: Json = {"index": choice.index, **said, "logprobs": None, "finish_reason": news.finish_reason}
        if self._order.logprobs:
            row["logprobs"] = self._logprobs(news.tokens)
        if self._order.token_ids:
            row["token_ids"] = [token.id for token in news.tokens]
        if news.finish_reason:
            row["stop_reason"] = news.stop
            spans = choice.generation.spans()
            row["weight_versions"] = [{"version": str(s.version), "start": s.start, "end": s.end} for s in spans]
        return row

    def _prompt_ids(self, choice: Choice) -> Json:
        return {"prompt_token_ids": choice.generation.prompt} if self._order.token_ids else {}

    def _usage(self, choices: Sequence[Choice]) -> Json:
        prompt = sum(len(ids) for ids in self._order.prompts)
        sampled = sum(len(choice.generation.tokens) for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


class ChatWriter(AnswerWriter):
    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, read: Sequence[tuple[Choice, News]]) -> Json:
        return super().whole(read) | self._prompt_ids(read[0][0])

    def opening(self, choice: Choice) -> Json:
        return super().opening(choice) | self._prompt_ids(choice)

    def _said(self, choice: Choice, news: News) -> Json:
        delta = self._delta(news)["delta"]
        calls = [{key: value for key, value in call.items() if key != "index"} for call in delta.get("tool_calls", [])]
        content = delta.get("content", None if calls else "")
        return {"message": {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})}

    def _opened(self, choice: Choice) -> Json:
        return {"delta": {"role": "assistant", "content": ""}}

    def _delta(self, news: News) -> Json:
        text = "".join(piece for piece in news.pieces if isinstance(piece, str))
        calls = [_call(piece) for piece in news.pieces if isinstance(piece, ToolCall)]
        return {"delta": ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})}

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        def entry(token: Token) -> Json:
            tops = [self._entry(*pair) for pair in token.top]
            return {**self._entry(token.id, token.logprob), "top_logprobs": tops}

        return {"content": [entry(token) for token in tokens]}

    def _entry(self, token_id: int, logprob: float) -> Json:
        text = self._codec.piece(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class CompletionWriter(AnswerWriter):
    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def _said(self, choice: Choice, news: News) -> Json:
        return self._delta(news) | self._prompt_ids(choice)

    def _opened(self, choice: Choice) -> Json:
        return {"text": "", "logprobs": None} | self._prompt_ids(choice)

    def _delta(self, news: News) -> Json:
        return {"text": "".join(piece for piece in news.pieces if isinstance(piece, str))}

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        return {
            "tokens": [self._codec.piece(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{self._codec.piece(i): value for i, value in token.top} for token in tokens],
        }


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}
