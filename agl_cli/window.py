"""Whether a harness knows how much context is served: some ask for more than there is, or go on past its end. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

ANSWER_VARIABLE = "CLAUDE_CODE_MAX_OUTPUT_TOKENS"
DEFAULT_ANSWER_TOKENS = 32_000
_CODEX_WINDOW = re.compile(r"model_context_window=(\d+)")
_SHELLS = ("sh", "bash")


def program(words: Sequence[str]) -> list[str]:
    """The words of the program that a command runs; where that is a shell's script, those of its first program."""
    if Path(words[0]).name not in _SHELLS or words[1:2] != ["-c"] or not words[2:]:
        return list(words)
    script = words[2].removeprefix("exec ").split()
    return list(words[4:]) if script[:1] == ['"$@"'] and words[4:] else script or list(words)


def misfit(words: Sequence[str], env: Mapping[str, str], context: int) -> tuple[str, str] | None:
    """What does not fit and what to do, of an agent's command and environment over `context` tokens."""
    harness = Path(program(words)[0]).name
    asked = env.get(ANSWER_VARIABLE, str(DEFAULT_ANSWER_TOKENS))
    if harness == "claude" and asked.isdecimal() and int(asked) >= context:
        return (
            f"Claude Code asks for {asked} tokens an answer, but {context} are served for prompt and answer together.",
            f"Set {ANSWER_VARIABLE} in agent.env well below that, or serve a policy with a longer context.",
        )
    told = _CODEX_WINDOW.search(" ".join(words))
    if harness == "codex" and (told is None or int(told[1]) > context):
        return (
            f"Codex {f'is told of {told[1]} tokens of' if told else 'is not told the'} context, but {context} tokens "
            "are served; it does not compact when they overflow.",
            f"Add -c model_context_window={context} -c model_auto_compact_token_limit={context * 3 // 4} to "
            "agent.command; its own instructions and tools must fit as well.",
        )
    return None
