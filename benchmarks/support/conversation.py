"""The conversation that simulated agents have with the model server, the same for every side that is measured.

An agent resends all of it each turn, as agents do. A rollout's mark stands in every text, so that no text of one
rollout is another's; token ids are the same in all. Answers look like vLLM's, with ids and log-probabilities in its
places. Requests and answers are templates: put the mark in with `marked`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MARK = b"@@mark@@@@@@"
MODEL = "policy"
CHARS_PER_TOKEN = 4
TURN = b"agl:"  # the newest message says `agl:<mark>:<turn>`, which the model server looks for
TURN_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens: `first` of the first prompt, `sampled` by each answer, `observed` by the agent after it."""

    turns: int
    first: int
    sampled: int
    observed: int

    def prompt_tokens(self, turn: int) -> int:
        return self.first + turn * (self.sampled + self.observed)

    @property
    def mean_prompt_tokens(self) -> float:
        return sum(self.prompt_tokens(turn) for turn in range(self.turns)) / self.turns

    @property
    def tokens(self) -> int:
        """Of the whole conversation."""
        return self.prompt_tokens(self.turns - 1) + self.sampled


def marked(template: bytes, rollout: int) -> bytes:
    return template.replace(MARK, b"%012d" % rollout)


def requests(shape: Shape, *, stream: bool = False, dialect: str = "chat") -> list[bytes]:
    """The body of each turn's request, in the words of a dialect."""
    messages: list[dict[str, str]] = []
    bodies = []
    for turn in range(shape.turns):
        size = shape.observed if turn else shape.first
        tail = f" {TURN.decode()}{MARK.decode()}:{turn:0{TURN_DIGITS}}"
        messages.append({"role": "user", "content": _text(f"user {turn}", size) + tail})
        body: dict[str, Any] = {"model": MODEL, **_said(dialect, messages)}
        bodies.append(json.dumps(body | {"stream": True} if stream else body, separators=(",", ":")).encode())
        messages.append({"role": "assistant", "content": _text(f"assistant {turn}", shape.sampled)})
    return bodies


def _said(dialect: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    if dialect == "completions":
        return {"prompt": "\n".join(message["content"] for message in messages)}
    if dialect == "responses":
        return {"input": messages, "store": False}
    return {"messages": messages, **({"max_tokens": 4096} if dialect == "messages" else {})}


def answers(shape: Shape, *, text: bool = False) -> list[bytes]:
    """The body of each turn's answer; `text` for those of plain completions."""
    form = _as_text if text else dict
    return [json.dumps(form(_answer(shape, turn)), separators=(",", ":")).encode() for turn in range(shape.turns)]


def _as_text(answer: dict[str, Any]) -> dict[str, Any]:
    """A chat answer, or a chunk of one, as that of plain completions."""
    answer = {**answer, "object": "text_completion"}
    prompt = answer.pop("prompt_token_ids", None)
    answer["choices"] = [_text_choice(choice, prompt) for choice in answer["choices"]]
    return answer


def _text_choice(choice: dict[str, Any], prompt: list[int] | None) -> dict[str, Any]:
    said = choice.get("message") or choice["delta"]
    kept = {key: value for key, value in choice.items() if key not in ("message", "delta")}
    if logprobs := choice["logprobs"]:
        entries = logprobs["content"]
        kept["logprobs"] = {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "text_offset": [],
            "top_logprobs": None,
        }
    return {**kept, "text": said["content"], **({"prompt_token_ids": prompt} if prompt else {})}


def chunks(shape: Shape, turn: int, *, text: bool = False) -> Iterator[bytes]:
    """The data of each event of a turn's streamed answer: first the prompt's ids, then one for each token."""
    form = _as_text if text else dict
    yield from (_data(form(chunk)) for chunk in _chunks(shape, turn))


def _chunks(shape: Shape, turn: int) -> Iterator[dict[str, Any]]:
    whole = _answer(shape, turn)
    choice = whole["choices"][0]
    head = {"id": whole["id"], "object": "chat.completion.chunk", "created": whole["created"], "model": MODEL}
    start = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    yield {**head, "choices": [start], "prompt_token_ids": whole["prompt_token_ids"]}
    content, size = choice["message"]["content"], CHARS_PER_TOKEN
    for at, token in enumerate(choice["token_ids"]):
        is_last = at == shape.sampled - 1
        piece = {
            "index": 0,
            "delta": {"content": content[at * size :] if is_last else content[at * size : (at + 1) * size]},
            "logprobs": {"content": [choice["logprobs"]["content"][at]]},
            "finish_reason": "stop" if is_last else None,
            "token_ids": [token],
        }
        yield {**head, "choices": [piece]}
    yield {**head, "choices": [], "usage": whole["usage"]}


def _answer(shape: Shape, turn: int) -> dict[str, Any]:
    ids = _ids(shape)
    prompt = shape.prompt_tokens(turn)
    sampled = ids[prompt : prompt + shape.sampled]
    chance = random.Random(turn)
    entries = [
        {"token": f" {t % 10_000:04}", "logprob": -chance.random() * 2, "bytes": list(b" %04d" % (t % 10_000))}
        for t in sampled
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": _text(f"assistant {turn}", shape.sampled), "tool_calls": []},
        "logprobs": {"content": [{**entry, "top_logprobs": []} for entry in entries]},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": sampled,
    }
    usage = {"prompt_tokens": prompt, "completion_tokens": shape.sampled, "total_tokens": prompt + shape.sampled}
    return {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": 1,
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
        "prompt_token_ids": ids[:prompt],
    }


def _ids(shape: Shape) -> list[int]:
    chance = random.Random(0)
    return [chance.randrange(1000, 150_000) for _ in range(shape.tokens)]


def _text(seed: str, tokens: int) -> str:
    """About `tokens` tokens of text that begins with the mark."""
    chance = random.Random(seed)
    words = " ".join(f"{chance.randrange(36**5):07x}" for _ in range(tokens * CHARS_PER_TOKEN // 8))
    return f"{MARK.decode()} {words}"[: tokens * CHARS_PER_TOKEN]


def _data(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
