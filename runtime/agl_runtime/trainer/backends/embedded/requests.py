"""Bodies of /v1/chat/completions and /v1/completions, read into an `Order`.

Every parameter is honoured, or refused by a `RequestRefused` that names it; null means not given. Only those in
`_WITHOUT_EFFECT` are ignored: they label a request and change nothing of its answer. `max_tokens` beyond the
server's limit, or beyond what the context leaves, is lowered to it; a prompt that leaves no room is refused with the
code `context_length_exceeded`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agl_runtime.trainer.backends.embedded.codec import Codec, Message
from agl_runtime.trainer.backends.embedded.refusal import RequestRefused
from agl_runtime.trainer.backends.embedded.sampling import SamplingParams
from agl_runtime.trainer.backends.embedded.tools import CLOSE

_WITHOUT_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "cache_salt")
)
# Parameters that are known and not supported, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "functions": ([],),
    "modalities": (["text"],),
}
# An agent's own template could say anything and take for ever.
_NOT_FOR_TEMPLATES = frozenset({"chat_template", "conversation", "tokenize", "tokenizer_kwargs", "return_tensors"})
_TOKEN_CHARACTERS = 64  # hardly any token is longer, and none of those follow each other through a whole context
_LEAST_TEMPERATURE = 0.01
_MOST_CHOICES = 128
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_Stop = Annotated[str, Field(min_length=1)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    n: int = Field(default=1, ge=1, le=_MOST_CHOICES)
    stop: _Stop | list[_Stop] = Field(default_factory=list)
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] = Field(default_factory=dict)
    return_token_ids: bool = False


class _ChatBody(_Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    reasoning_effort: str | None = None  # a word for the template, as vLLM takes it
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class _CompletionBody(_Body):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server serves: the model's name, the most tokens of an answer and of the context, the known ids."""

    model: str
    max_tokens: int
    context: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be generated: `n` answers to each of `prompts` (token ids), with the `params` at its place, and how
    they are told.

    An answer's text ends before the first of `stops` and after the first of `closers`. `logprobs` and `token_ids` say
    whether they are told; `tools` whether the text is searched for tool calls.
    """

    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    n: int
    seed: int | None
    stops: tuple[str, ...]
    closers: tuple[str, ...]
    stream: bool
    usage_chunk: bool
    logprobs: bool
    token_ids: bool
    tools: bool


def read_chat(body: Any, codec: Codec, limits: Limits) -> Order:
    """Raises RequestRefused."""
    parsed, tools, prompt = _rendered(body, codec, limits)
    if parsed.top_logprobs and not parsed.logprobs:
        raise RequestRefused("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return _order(
        parsed,
        limits,
        [prompt],
        max_tokens=parsed.max_completion_tokens or parsed.max_tokens,
        top_logprobs=parsed.top_logprobs,
        logprobs=parsed.logprobs,
        tools=bool(tools),
        closers=(CLOSE,) if tools and not parsed.parallel_tool_calls else (),
    )


def read_prompt(body: Any, codec: Codec, limits: Limits) -> list[int]:
    """The token ids of a chat body's prompt, also of one that is too long to be answered. Raises RequestRefused."""
    return _rendered(body, codec, limits)[2]


def _rendered(body: Any, codec: Codec, limits: Limits) -> tuple[_ChatBody, list[dict[str, Any]], list[int]]:
    if isinstance(body, dict):
        _check_size(_characters([body.get("messages"), body.get("tools")]), limits)
    parsed = _validated(_ChatBody, body)
    if named := _NOT_FOR_TEMPLATES & parsed.chat_template_kwargs.keys():
        raise RequestRefused(
            f"chat_template_kwargs cannot hold {', '.join(sorted(named))}.", param="chat_template_kwargs"
        )
    tools = _tools(parsed)
    messages = [_message(index, message) for index, message in enumerate(parsed.messages)]
    effort = {"reasoning_effort": parsed.reasoning_effort} if parsed.reasoning_effort else {}
    return parsed, tools, codec.render(messages, tools, {**effort, **parsed.chat_template_kwargs})


def read_completion(body: Any, codec: Codec, limits: Limits) -> Order:
    """Raises RequestRefused."""
    given = body.get("prompt") if isinstance(body, dict) else None
    for piece in [given, *given] if isinstance(given, list) else [given]:
        if isinstance(piece, str):
            _check_size(len(piece), limits)
        elif isinstance(piece, list) and len(piece) >= limits.context:
            raise _too_long(limits.context, str(len(piece)))
    parsed = _validated(_CompletionBody, body)
    prompt = parsed.prompt
    items: Sequence[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    prompts = [codec.encode(x, special=parsed.add_special_tokens) if isinstance(x, str) else x for x in items]
    if not prompts or any(not 0 <= token_id < limits.vocabulary for ids in prompts for token_id in ids):
        raise RequestRefused(f"prompt must hold text or token ids below {limits.vocabulary}.", param="prompt")
    return _order(
        parsed,
        limits,
        prompts,
        max_tokens=parsed.max_tokens,
        top_logprobs=parsed.logprobs or 0,
        logprobs=parsed.logprobs is not None,
    )


def _order(
    parsed: _Body,
    limits: Limits,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | None,
    top_logprobs: int,
    logprobs: bool,
    tools: bool = False,
    closers: tuple[str, ...] = (),
) -> Order:
    if parsed.model != limits.model:
        raise RequestRefused(
            f"There is no model {parsed.model}, only {limits.model}.", param="model", code="model_not_found", status=404
        )
    most = min(max_tokens or limits.max_tokens, limits.max_tokens)
    return Order(
        prompts=tuple(tuple(ids) for ids in prompts),
        params=tuple(
            SamplingParams(
                max_tokens=min(most, _room(len(ids), limits.context)),
                temperature=parsed.temperature,
                top_p=parsed.top_p,
                top_k=max(parsed.top_k, 0),
                top_logprobs=top_logprobs,
            )
            for ids in prompts
        ),
        n=parsed.n,
        seed=parsed.seed,
        stops=(parsed.stop,) if isinstance(parsed.stop, str) else tuple(parsed.stop),
        closers=closers,
        stream=parsed.stream,
        usage_chunk=bool(parsed.stream_options.get("include_usage")),
        logprobs=logprobs,
        token_ids=parsed.return_token_ids,
        tools=tools,
    )


def _room(prompt_tokens: int, context: int) -> int:
    """Tokens that may follow the prompt."""
    if not prompt_tokens:
        raise RequestRefused("The prompt is empty.", param="prompt")
    if prompt_tokens >= context:
        raise _too_long(context, str(prompt_tokens))
    return context - prompt_tokens


def _too_long(context: int, tokens: str) -> RequestRefused:
    return RequestRefused(
        f"This model's maximum context length is {context} tokens; the prompt has {tokens}.",
        "Shorten it.",
        code="context_length_exceeded",
    )


def _check_size(characters: int, limits: Limits) -> None:
    """Refuses what cannot fit before any of it is encoded, which would take long and much memory."""
    if characters > limits.context * _TOKEN_CHARACTERS:
        raise _too_long(limits.context, "many more")


def _characters(value: Any) -> int:
    """Of all texts within; not by recursion, as JSON may be nested deeper than that goes."""
    left, characters = [value], 0
    while left:
        item = left.pop()
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, dict):
            left += [*item, *item.values()]
        elif isinstance(item, list):
            left += item
    return characters


B = TypeVar("B", bound=_Body)


def _validated(form: type[B], body: Any) -> B:
    if not isinstance(body, dict):
        raise RequestRefused("The request's body must be a JSON object.")
    given = {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}
    for name in _NEUTRAL.keys() & given.keys():
        if given.pop(name) not in _NEUTRAL[name]:
            raise RequestRefused(
                f"{name} is not supported by this model server.", "Leave it out.", param=name, code="unsupported_value"
            )
    try:
        parsed = form.model_validate(given)
    except ValidationError as error:
        raise _refusal(error) from error
    if 0 < parsed.temperature < _LEAST_TEMPERATURE:
        raise RequestRefused(f"temperature must be 0 or at least {_LEAST_TEMPERATURE}.", param="temperature")
    return parsed


def _refusal(error: ValidationError) -> RequestRefused:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        return RequestRefused(f"Unknown parameter: {name}.", "Leave it out.", param=name, code="unknown_parameter")
    return RequestRefused(f"{name}: {first['msg']}.", param=name, code="invalid_value")


def _tools(parsed: _ChatBody) -> list[dict[str, Any]]:
    """The tools that the model is told of. With `tool_choice` "none" it is told of none."""
    if parsed.tool_choice not in ("auto", "none"):
        raise RequestRefused(
            "tool_choice can only be auto or none: forcing a call would change what the model samples.",
            param="tool_choice",
            code="unsupported_value",
        )
    for index, tool in enumerate(parsed.tools):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise RequestRefused(f"tools[{index}] must be a function with a name.", param="tools", code="invalid_value")
    return parsed.tools if parsed.tool_choice == "auto" else []


def _message(index: int, message: Mapping[str, Any]) -> Message:
    """The message as chat templates take it: content is text, tool calls are functions."""
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str) or message["role"] not in _ROLES:
        raise RequestRefused(f"{where}.role must be one of {', '.join(_ROLES)}.", param="messages")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(_is_call(call) for call in calls):
        raise RequestRefused(f"{where}.tool_calls must be function calls with name and arguments.", param="messages")
    read = {**message, "role": _ROLES[message["role"]], "content": _content(where, message.get("content"))}
    return {name: value for name, value in read.items() if value is not None}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and all(isinstance(function.get(key), str) for key in ("name", "arguments"))


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _content(where: str, content: Any) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    texts = [part["text"] for part in parts if _is_text(part)]
    if len(texts) < len(parts):
        raise RequestRefused(f"{where}.content must be text: this model reads nothing else.", param="messages")
    return "\n".join(texts)
