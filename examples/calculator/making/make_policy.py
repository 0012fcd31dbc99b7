"""Makes the warm policy of this example: a tokenizer and a Qwen3-shaped model of 0.2 million parameters.

First the model is taught to do everything right, which makes its skills sharp; then, for a shorter time, to have the
bad habits of `conversations.BAD`. No expression of a validation task is in either. The same seed gives the same policy
with the same versions of torch and transformers. policy/chat_template.jinja is written by hand and kept as it is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from conversations import (
    ANSWER,
    BAD,
    CALL,
    CALL_END,
    CALL_HEAD,
    CALL_TAIL,
    GOOD,
    GUESS,
    TOOLS,
    Habits,
    Span,
    converse,
    practise,
)
from make_tasks import WORDINGS, WORDS, Expression, draw, held_out
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

POLICY = Path(__file__).parent.parent / "policy"
SEED = 0
BATCH = 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Whole phrases as tokens: a tool call is ten tokens, and text has one tokenization unless it spells out a phrase.
PHRASES = (
    *(CALL, CALL_HEAD, CALL_TAIL, CALL_END, ANSWER, GUESS),
    *("system\n", "user\n", "assistant\n", "tool\n", "tools:", " calculator(expression)"),
    *(wording.partition("{}")[0] for wording in WORDINGS),
    *(f" {word} " for word in WORDS.values()),
)

Rows = Iterator[list[Span]]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, the phrases and the special tokens; any text can be encoded, and nothing is merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PHRASES])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (POLICY / "chat_template.jinja").read_text(encoding="utf-8")
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def asker(tokenizer: PreTrainedTokenizerFast) -> Callable[[str, Expression], str]:
    """A function that renders a question as the policy will read it."""

    @cache
    def render(wording: str) -> str:
        messages = [{"role": "user", "content": wording}]
        return str(tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False))

    return lambda wording, expression: render(wording).replace("{}", expression.spoken)


def lessons(tokenizer: PreTrainedTokenizerFast, habits: Habits, practice: float, rng: random.Random) -> Rows:
    """Endless conversations with these habits; a share `practice` of them teaches the skills alone."""
    ask = asker(tokenizer)
    kept_back = set(held_out())
    while True:
        wording, expression = rng.choice(WORDINGS), draw(rng)
        if expression in kept_back:
            continue
        prompt = ask(wording, expression)
        if rng.random() < practice:
            yield practise(prompt, expression, rng)
        else:
            yield converse(prompt, wording, expression, habits, rng)


def collate(tokenizer: PreTrainedTokenizerFast, rows: list[list[Span]]) -> tuple[Tensor, Tensor]:
    """Token ids and the mask of taught tokens, both [rows, longest row]."""
    ids, taught = [], []
    for spans in rows:
        pieces = [tokenizer(span.text, add_special_tokens=False)["input_ids"] for span in spans]
        ids.append([token for piece in pieces for token in piece])
        taught.append([span.taught for span, piece in zip(spans, pieces, strict=True) for _ in piece])
    width = max(len(row) for row in ids)
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([row + [pad] * (width - len(row)) for row in ids]),
        torch.tensor([row + [False] * (width - len(row)) for row in taught]),
    )


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Rows, *, steps: int, lr: float) -> None:
    """Supervised steps on `rows`: AdamW, a short warm-up, then level, then down to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50, (steps - step) / (0.6 * steps))
    )
    for step in range(1, steps + 1):
        ids, taught = collate(tokenizer, [next(rows) for _ in range(BATCH)])
        logits = model(ids, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits[taught[:, 1:]], ids[:, 1:][taught[:, 1:]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.4f}, {time.process_time():.0f} CPU seconds", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    rng = random.Random(SEED)
    teach(model, tokenizer, lessons(tokenizer, GOOD, 0.5, rng), steps=1000, lr=3e-3)
    teach(model, tokenizer, lessons(tokenizer, BAD, 0.5, rng), steps=400, lr=1e-3)
    model.save_pretrained(POLICY)
    tokenizer.save_pretrained(POLICY)
    size_bytes = sum(file.stat().st_size for file in POLICY.iterdir())
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {size_bytes / 1e6:.2f} MB in {POLICY}")


if __name__ == "__main__":
    main()
