from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.errors import ConfigError
from agl_runtime.trainer.backends.verl.families import family_of, read_family

JSON_CALLS = '<tool_call>\n{"name": ...}\n</tool_call>'
XML_CALLS = "<tool_call>\n<function=name>\n<parameter=x>"


@pytest.mark.parametrize(
    ("model_type", "template", "tools", "reasoning"),
    [
        ("qwen2", JSON_CALLS, "hermes", None),
        ("qwen3", JSON_CALLS + "enable_thinking", "hermes", "qwen3"),
        ("qwen3", JSON_CALLS + r"'assistant\n<think>\n'", "hermes", "qwen3"),
        ("qwen3", JSON_CALLS + r"message.role + '\n<think>\n'", "hermes", None),
        ("qwen3", JSON_CALLS, "hermes", None),
        ("qwen3_moe", XML_CALLS, "qwen3_xml", None),
        ("qwen3_5_moe", XML_CALLS + "enable_thinking", "qwen3_xml", "qwen3"),
        ("llama", 'ipython {"name": "f", "parameters": {}}', "llama3_json", None),
        ("llama", "plain", None, None),
        ("mistral", "[TOOL_CALLS]", "mistral", None),
        ("glm4_moe", "<tool_call><arg_key>", "glm45", None),
        ("deepseek_v3", "function```json", "deepseek_v3", None),
        ("deepseek_v3", "thinking is defined", "deepseek_v31", "deepseek_v3"),
        ("gpt_oss", "<|channel|>analysis", "openai", "openai_gptoss"),
        ("unheard_of", "plain", None, None),
    ],
)
def test_the_template_decides_together_with_the_type(
    model_type: str, template: str, tools: str | None, reasoning: str | None
):
    family = family_of({"model_type": model_type}, template)
    assert (family.tool_parser, family.reasoning_parser) == (tools, reasoning)


def test_a_model_of_text_and_images_tells_of_its_text():
    config = {"model_type": "qwen3_5_moe", "text_config": {"max_position_embeddings": 99, "num_experts": 128}}
    family = family_of(config, "")
    assert (family.context, family.experts) == (99, 128)


@pytest.mark.parametrize("stored", ["{template}", [{"name": "tool_use", "template": "{template}"}]])
def test_a_template_in_the_tokenizers_settings_is_read(tmp_path: Path, stored: Any):
    text = json.dumps({"chat_template": stored}).replace("{template}", "[TOOL_CALLS]")
    (tmp_path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}', encoding="utf-8")
    assert read_family(tmp_path).tool_parser == "mistral"


def test_a_folder_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot be read as a model: .* Fetch or save the model again\."):
        read_family(tmp_path)


@pytest.mark.parametrize(
    ("config", "routing"),
    [
        ({"num_hidden_layers": 48, "num_experts_per_tok": 8}, (48, 8)),
        ({"text_config": {"num_hidden_layers": 40, "num_experts_per_token": 4}}, (40, 4)),
        ({"num_hidden_layers": 48}, None),
    ],
)
def test_a_mixture_of_experts_tells_the_shape_of_its_routing(config: dict[str, Any], routing: tuple[int, int] | None):
    assert family_of(config, "").routing == routing
