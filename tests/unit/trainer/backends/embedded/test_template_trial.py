from __future__ import annotations

from pathlib import Path

import pytest

from agl_runtime.trainer.backends.embedded.template_trial import faults
from fakes.tiny_model import TEMPLATE, make_tiny_tokenizer

THINKING = TEMPLATE.replace("{{ m.content }}", "<think>{{ m.reasoning_content or '' }}</think>{{ m.content }}")
FORGETFUL = THINKING.replace("m.reasoning_content", "(m.reasoning_content if loop.index0 > last_asked)").replace(
    "{%- for m in messages %}",
    "{%- set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% set last_asked = ns.last %}{% for m in messages %}",
)
SILENT = THINKING.replace("m.reasoning_content or", "false or")
DATED = TEMPLATE.replace("{%- if tools %}", "{{ messages | length }}{%- if tools %}")
NO_TOOLS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


def save(folder: Path, template: str) -> Path:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (TEMPLATE, []),
        (THINKING, []),
        (FORGETFUL, ["writes earlier turns anew when the user speaks again"]),
        (SILENT, ["drops the reasoning of an answer that called a tool"]),
        (
            DATED,
            [
                "writes what stands before an answer anew once the answer is there",
                "writes earlier turns anew when the user speaks again",
            ],
        ),
        (
            NO_TOOLS.replace("a: ", "assistant: "),
            ["has no place for tools, so that those which an agent offers are not shown"],
        ),
    ],
)
def test_what_a_template_does_to_earlier_turns(tmp_path: Path, template: str, found: list[str]) -> None:
    assert faults(save(tmp_path, template)) == found
