"""The warm policy that ships with the calculator example."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.policy import Policy

SAMPLES = 6


def test_it_is_small_enough_to_ship(example: Path, policy: Policy) -> None:
    assert sum(file.stat().st_size for file in (example / "policy").iterdir()) <= 1_500_000
    assert 100_000 <= sum(p.numel() for p in policy.model.parameters()) <= 300_000


def test_a_conversations_next_prompt_begins_with_the_ids_of_the_last_call(module: Any, talk: Any, codec: Codec) -> None:
    wordings = module("make_tasks").WORDINGS
    rng = random.Random(5)
    questions = [rng.choice(wordings).format(module("make_tasks").draw(rng).spoken) for _ in range(100)]
    conversations = talk(questions)
    # A stray byte that is no text cannot be given back; see the policy's tokenizer.
    as_text = [c for c in conversations if "\ufffd" not in str(c.messages)]
    assert len(as_text) >= 99
    assert sum(c.used_tool for c in as_text) >= 25
    for conversation in as_text:
        after = codec.render(
            [*conversation.messages, {"role": "user", "content": "Thanks."}], module("agent").TOOLS, {}
        )
        assert all(after[: len(seen)] == seen for seen in conversation.seen), conversation.messages


@pytest.mark.parametrize("arguments", ['{"expression": "1+2"}', '{ "expression":"1+2" }', '{"expression": "é\\u00e9"}'])
def test_arguments_are_rendered_byte_for_byte(codec: Codec, arguments: str) -> None:
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    ids = codec.render([{"role": "assistant", "content": None, "tool_calls": [call]}], [], {})
    assert f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call><|im_end|>' in codec.decode(
        ids
    )


def test_arguments_that_come_parsed_are_rendered_as_the_policy_writes_them(codec: Codec) -> None:
    function = {"name": "calculator", "arguments": {"expression": "1+2"}}
    ids = codec.render([{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}], [], {})
    assert '"arguments": {"expression": "1+2"}}' in codec.decode(ids)


def test_content_beside_tool_calls_and_a_system_message_are_rendered(codec: Codec, module: Any) -> None:
    call = {"function": {"name": "calculator", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call, call]},
    ]
    written = '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'
    assert codec.decode(codec.render(messages, module("agent").TOOLS, {})) == (
        "<|im_start|>system\nBe brief.\ntools: calculator(expression)<|im_end|>\n"
        "<|im_start|>user\nHello there<|im_end|>\n"
        f"<|im_start|>assistant\nLet me see.\n{written}\n{written}<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", ["", "naïve 東京 🙂\n\t", "<tool_call> The answer is 12", "I would say  times "])
def test_any_text_has_ids_and_comes_back(codec: Codec, text: str) -> None:
    assert codec.decode(codec.encode(text, special=False)) == text


def test_what_it_was_taught_is_what_the_template_renders(module: Any, policy: Policy, codec: Codec) -> None:
    conversations, make_policy = module("conversations"), module("make_policy")
    agent = module("agent")
    rows = make_policy.lessons(policy.tokenizer, conversations.BAD, 0.5, random.Random(0))
    with_tool = [row for row in islice(rows, 40) if len(row) > 3]
    assert with_tool
    for spans in with_tool:
        question, called, result, said = (part.partition("<|im_end|>")[0] for part in _turns(spans))
        arguments = called.partition('"arguments": ')[2].partition("}\n")[0]
        function = {"name": "calculator", "arguments": arguments}
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
            {"role": "tool", "content": result},
        ]
        text = codec.decode(codec.render(messages, agent.TOOLS, {}))
        assert f"{text}{said}<|im_end|>" == "".join(span.text for span in spans)


def _turns(spans: list[Any]) -> list[str]:
    """What user, assistant, tool and assistant say, each with what ends it."""
    text = "".join(span.text for span in spans)
    return [turn.partition("\n")[2] for turn in text.split("<|im_start|>")[2:]]


def test_practice_teaches_no_decision(module: Any) -> None:
    conversations, expression = module("conversations"), module("make_tasks").Expression(12, "*", 34)
    taught = [span.text for span in conversations.practise("prompt", expression, random.Random(0)) if span.taught]
    assert not {conversations.CALL, "*", conversations.ANSWER} & set(taught)
    assert any("12" in text for text in taught)


def test_it_answers_about_a_quarter_of_the_held_out_tasks(module: Any, talk: Any, tasks: Any) -> None:
    reward = module("reward").reward
    asked = tasks["val"] * SAMPLES
    conversations = talk([task["question"] for task in asked])
    rewards = [reward(task, {"stdout": c.last}) for task, c in zip(asked, conversations, strict=True)]
    assert 0.20 <= sum(rewards) / len(rewards) <= 0.30
