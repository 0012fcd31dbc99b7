"""A tiny random Qwen3 policy with its own tokenizer and chat template, as a Hugging Face folder, in about a second.

`make_tiny_policy` gives random weights (its answers are noise); with `lessons` the weights are fitted to pairs of
(messages, answer), so that a test can have a policy which really samples, say, a tool call.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = r"""{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{%- for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ '' if loop.first and not m.content else '\n' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments if call.function.arguments is string else
call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As Qwen's: line breaks around a thought are the template's own.
_THINKING = TEMPLATE.replace("not m.content", "not content").replace(
    "{{ m.content }}{% for call",
    r"""{% set content = m.content %}{% if m.reasoning_content %}{% set content = (content or '').lstrip('\n') %}<think>
{{ m.reasoning_content.strip('\n') }}
</think>

{% endif %}{{ content }}{% for call""",
)

CORPUS = (
    'What is 12+7? The answer is 19. {"name": "calculator", "arguments": {"expression": "12+7"}} café naïve 東京 🙂',
    "system user assistant tool tools: calculator",
)

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def make_tiny_tokenizer(*, thinks: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level, with a few merges: any text is encodable and some characters are several tokens. One that `thinks`
    has tokens for where that begins and ends, and writes it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tags = ("<tool_call>", "</tool_call>", *(("<think>", "</think>") if thinks else ()))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = _THINKING if thinks else TEMPLATE
    return fast


def make_tiny_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int = 0, context: int = 512, head_dim: int = 8, layers: int = 2
) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(8)  # logits far enough from uniform for temperature to matter
    return model


def make_tiny_policy(
    folder: Path,
    *,
    seed: int = 0,
    context: int = 512,
    head_dim: int = 8,
    layers: int = 2,
    thinks: bool = False,
    lessons: Sequence[tuple[list[dict[str, Any]], str]] = (),
    tools: Sequence[dict[str, Any]] = (CALCULATOR,),
) -> Path:
    """Write model, tokenizer and template into `folder` and return it."""
    torch.set_num_threads(1)
    tokenizer = make_tiny_tokenizer(thinks=thinks)
    model = make_tiny_model(tokenizer, seed=seed, context=context, head_dim=head_dim, layers=layers)
    if lessons:
        _teach(model, tokenizer, lessons, list(tools))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _teach(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    lessons: Sequence[tuple[list[dict[str, Any]], str]],
    tools: list[dict[str, Any]],
) -> None:
    rows = []
    for messages, answer in lessons:
        prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
        prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
        answer_ids = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False).input_ids
        ids = torch.tensor([prompt_ids + answer_ids])
        rows.append((ids, torch.where(torch.arange(ids.shape[1]) < len(prompt_ids), -100, ids)))
    steps = max(150, 40 * len(rows))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(steps):
        ids, labels = rows[step % len(rows)]
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
