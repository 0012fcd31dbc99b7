"""Between text and token ids: the tokenizer, its chat template, and what of an answer's ids is text.

Ids that end an answer and special tokens (padding, turn marks) are not part of an answer's text; tool-call tags are,
also where a tokenizer marks them as special.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from agl_runtime.trainer.backends.embedded.refusal import RequestRefused
from agl_runtime.trainer.backends.embedded.text import Detokenizer
from agl_runtime.trainer.backends.embedded.tools import CLOSE, OPEN

logger = logging.getLogger(__name__)

Message = dict[str, Any]

# How chat templates ask whether a call's arguments come as text or parsed.
_TAKES_TEXT = re.compile(r"arguments\s+is\s+(not\s+)?(string|mapping)")
# Whatever a template may do with a message that it does not expect.
_TEMPLATE_ERRORS = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)


class Codec:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        tags = {tokenizer.convert_tokens_to_ids(tag) for tag in (OPEN, CLOSE)}
        self._hidden = (set(tokenizer.all_special_ids) | set(stop_ids)) - tags
        # Some templates write arguments that come as text once more as a JSON string: those get the parsed value.
        self._takes_text = bool(_TAKES_TEXT.search(str(tokenizer.chat_template)))
        self._knows_tools = "tools" in str(tokenizer.chat_template)
        self._pieces: dict[int, str] = {}

    def render(self, messages: Sequence[Message], tools: Sequence[Any], template: Mapping[str, Any]) -> list[int]:
        """Ids of a conversation with the beginning of the next answer. Raises RequestRefused for what the chat template
        cannot express."""
        if tools and not self._knows_tools:
            self._knows_tools = True  # told once
            logger.warning("the chat template has no place for tools: the model is not told of those that agents offer")
        try:
            text = self._tokenizer.apply_chat_template(
                [self._for_template(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                **template,
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestRefused(f"The chat template refuses these messages: {error}.", param="messages") from error
        return self.encode(str(text), special=False)

    def _for_template(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not calls or self._takes_text:
            return message
        return {**message, "tool_calls": [{**call, "function": _parsed(call["function"])} for call in calls]}

    def encode(self, text: str, *, special: bool) -> list[int]:
        """`special` adds what the tokenizer puts around a text (a beginning-of-text token)."""
        return list(self._tokenizer(text, add_special_tokens=special, verbose=False).input_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of all ids, special tokens kept."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def piece(self, token_id: int) -> str:
        """Text of one id; lossy where it is part of a character."""
        if token_id not in self._pieces:
            self._pieces[token_id] = self.decode([token_id])
        return self._pieces[token_id]

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.decode)

    def visible(self, ids: Iterable[int]) -> list[int]:
        """Those ids that are part of an answer's text."""
        return [token_id for token_id in ids if token_id not in self._hidden]


def _parsed(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except ValueError:
        return dict(function)
