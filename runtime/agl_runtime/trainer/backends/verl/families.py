"""Which of vLLM's parsers read a model's tool calls and reasoning (pure, but for `read_family`).

The chat template decides together with the model type: Qwen3 and Qwen3-Coder share a type and differ in what they are
taught to write. An unknown family has no tool parser: its agents get tool calls as plain text, which `agl doctor` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """`tool_parser` and `reasoning_parser` are vLLM's names, None where there is none. `context` is the model's own
    limit in tokens, None where its config.json does not say; `experts` of a layer, 0 for a dense model; `routing` its
    layers and the experts of a token in each, None for a dense model."""

    model_type: str
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    context: int | None = None
    experts: int = 0
    routing: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """The model type begins with `model_type` and the template holds `marker`."""

    model_type: str
    marker: str
    tool_parser: str
    reasoning_parser: str | None = None


# The first that fits counts. Reasoning is parsed only where the template begins or switches it (REASONING_MARKS): many
# write earlier reasoning into the history though their model no longer reasons, and its answers would look like it.
_TABLE = (
    _Row("qwen3", "<function=", "qwen3_xml", "qwen3"),
    _Row("qwen", "<tool_call>", "hermes", "qwen3"),
    _Row("llama4", "", "llama4_pythonic"),
    _Row("llama", "<tool_call>", "hermes"),
    _Row("llama", '"parameters"', "llama3_json"),
    _Row("mistral", "[TOOL_CALLS]", "mistral", "mistral"),
    _Row("ministral", "[TOOL_CALLS]", "mistral", "mistral"),
    _Row("mixtral", "[TOOL_CALLS]", "mistral"),
    _Row("glm4_moe", "", "glm45", "glm45"),
    _Row("glm", "<arg_key>", "glm45", "glm45"),
    _Row("deepseek_v32", "", "deepseek_v32", "deepseek_v3"),
    _Row("deepseek_v3", "```json", "deepseek_v3", "deepseek_r1"),
    _Row("deepseek_v3", "", "deepseek_v31", "deepseek_v3"),
    _Row("gpt_oss", "", "openai", "openai_gptoss"),
    _Row("kimi_k2", "", "kimi_k2", "kimi_k2"),
    _Row("granite", "", "granite", "granite"),
    _Row("seed_oss", "", "seed_oss", "seed_oss"),
    _Row("minimax_m2", "", "minimax_m2", "minimax_m2"),
    _Row("gemma4", "", "gemma4", "gemma4"),
    _Row("", "<tool_call>\n{", "hermes"),
)
REASONING_MARKS = (
    "enable_thinking",
    "thinking is defined",
    "thinking_budget",
    r"assistant\n<think>",
    r"ai\n<think>",
    "><think>",
    "[THINK]",
    "<|channel|>",
)
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def family_of(config: Mapping[str, Any], template: str) -> Family:
    """`config` is the content of config.json, `template` the text of the chat template."""
    text = config.get("text_config") or config
    model_type = str(config.get("model_type", ""))
    row = next((row for row in _TABLE if model_type.startswith(row.model_type) and row.marker in template), None)
    reasons = any(mark in template for mark in REASONING_MARKS)
    return Family(
        model_type=model_type,
        tool_parser=row.tool_parser if row else None,
        reasoning_parser=row.reasoning_parser if row and reasons else None,
        context=text.get("max_position_embeddings"),
        experts=next((int(text[name]) for name in EXPERTS if text.get(name)), 0),
        routing=next(((int(text["num_hidden_layers"]), int(text[name])) for name in CHOSEN if text.get(name)), None),
    )


def read_family(folder: Path) -> Family:
    """The family of a Hugging Face folder. Raises ConfigError where its config.json cannot be read."""
    try:
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        template = _template(folder)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{folder} cannot be read as a model: {error}.", "Fetch or save the model again.") from error
    return family_of(config, template)


def _template(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    found = json.loads(settings.read_text(encoding="utf-8")).get("chat_template") if settings.is_file() else None
    if isinstance(found, list):  # several by name
        return "".join(str(item.get("template", "")) for item in found)
    return str(found or "")
