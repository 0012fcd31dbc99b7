from __future__ import annotations

from typing import Any

import pytest

from agl_cli.window import misfit

CODEX = ["sh", "-c", 'exec "$@" -c model=policy', "sh", "codex", "exec"]
ANSWER = "CLAUDE_CODE_MAX_OUTPUT_TOKENS"


@pytest.mark.parametrize(
    ("words", "env", "what"),
    [
        (["claude", "-p", "x"], {ANSWER: "4096"}, "Claude Code asks for 4096 tokens an answer, but 1024 are served"),
        (["claude"], {}, "Claude Code asks for 32000 tokens"),
        (["claude"], {ANSWER: "512"}, None),
        (["claude"], {ANSWER: "many"}, None),
        (CODEX, {}, "Codex is not told the context, but 1024 tokens are served"),
        ([*CODEX, "-c", "model_context_window=32768"], {}, "Codex is told of 32768 tokens of context"),
        ([*CODEX, "-c", "model_context_window=1024"], {}, None),
        (["python", "agent.py"], {}, None),
    ],
)
def test_what_a_harness_is_not_told_of_the_context_is_named(words: list[str], env: dict[str, str], what: Any) -> None:
    found = misfit(words, env, 1024)
    assert found is None if what is None else found is not None and found[0].startswith(what)
