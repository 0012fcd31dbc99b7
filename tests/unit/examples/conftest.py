"""The calculator example's own modules, and conversations that its policy really has."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from agl_runtime.trainer.backends.embedded.codec import Codec, Message
from agl_runtime.trainer.backends.embedded.policy import Policy, load_policy
from agl_runtime.trainer.backends.embedded.tools import ToolCall, ToolReader

EXAMPLE = Path(__file__).parents[3] / "examples" / "calculator"
MOST_TOKENS = 48


@pytest.fixture(scope="session")
def example() -> Path:
    return EXAMPLE


@pytest.fixture(scope="session")
def module() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the example or of its `making` folder by name."""
    folders = [str(EXAMPLE), str(EXAMPLE / "making")]
    sys.path[:0] = folders
    yield importlib.import_module
    for folder in folders:
        sys.path.remove(folder)
    for name, loaded in list(sys.modules.items()):
        if str(getattr(loaded, "__file__", None)).startswith(str(EXAMPLE)):
            del sys.modules[name]


@pytest.fixture(scope="session")
def tasks() -> dict[str, list[dict[str, Any]]]:
    files = {name: (EXAMPLE / "tasks" / f"{name}.jsonl").read_text(encoding="utf-8") for name in ("train", "val")}
    return {name: [json.loads(line) for line in text.splitlines()] for name, text in files.items()}


@pytest.fixture(scope="session")
def policy() -> Policy:
    torch.set_num_threads(1)
    return load_policy(EXAMPLE / "policy")


@pytest.fixture(scope="session")
def codec(policy: Policy) -> Codec:
    return Codec(policy.tokenizer, policy.stop_ids)


@dataclass
class Conversation:
    """`seen` are the ids of each call, prompt and sampled together; `used_tool` whether a tool was called."""

    messages: list[Message]
    seen: list[list[int]] = field(default_factory=list)
    used_tool: bool = False

    @property
    def last(self) -> str:
        return str(self.messages[-1]["content"])


Talk = Callable[[list[str]], list[Conversation]]


@pytest.fixture(scope="session")
def talk(policy: Policy, codec: Codec, module: Callable[[str], ModuleType]) -> Talk:
    """Asks questions at temperature 1, a call of the tool included; answers go back as the agent sends them."""
    agent = module("agent")

    def answer(conversation: Conversation, sampled: list[int]) -> bool:
        """Whether the conversation goes on."""
        reader = ToolReader()
        pieces = [*reader.push(codec.decode(codec.visible(sampled))), *reader.finish()]
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        message: Message = {"role": "assistant", "content": "".join(p for p in pieces if isinstance(p, str)) or None}
        if calls:
            message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        results = [{"role": "tool", "content": agent.run_tool(call.arguments)} for call in calls]
        conversation.messages += [message, *results]
        conversation.used_tool |= bool(calls)
        return bool(calls)

    def talk(questions: list[str]) -> list[Conversation]:
        torch.manual_seed(0)
        conversations = [Conversation([{"role": "user", "content": question}]) for question in questions]
        going = conversations
        for _ in range(2):
            prompts = [codec.render(conversation.messages, agent.TOOLS, {}) for conversation in going]
            sampled = sample(policy, prompts)
            for conversation, prompt, ids in zip(going, prompts, sampled, strict=True):
                conversation.seen.append(prompt + ids)
            going = [c for c, ids in zip(going, sampled, strict=True) if answer(c, ids)]
        return conversations

    return talk


def sample(policy: Policy, prompts: list[list[int]]) -> list[list[int]]:
    """An answer to each prompt, at temperature 1."""
    pad, width = policy.tokenizer.pad_token_id, max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    rows = policy.model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MOST_TOKENS
    )[:, width:].tolist()
    ends = [next((at + 1 for at, token in enumerate(row) if token in policy.stop_ids), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]
