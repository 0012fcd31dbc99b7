"""Claude Code, where the agent's command names it.

Redirected by its environment alone. `claude` by itself becomes a headless run on the task; a command with arguments is
kept. The end of a run is its exit code and what it says about the task.
"""

from __future__ import annotations

from pathlib import Path

from agl_cli.harnesses.base import Integration, Repository, task_field

ENV = {
    "ANTHROPIC_MODEL": "policy",
    "IS_SANDBOX": "1",  # as root it refuses to go without permissions otherwise
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
    "ENABLE_TOOL_SEARCH": "false",
}
ARGUMENTS = ("--output-format", "json", "--permission-mode", "bypassPermissions")


class ClaudeCode:
    def integrate(self, repository: Repository, command: tuple[str, ...]) -> Integration | None:
        if not command or Path(command[0]).name != "claude":
            return None
        alone = (*command, "-p", task_field(repository), *ARGUMENTS)
        return Integration(
            harness="Claude Code",
            evidence="given by --command",
            command=command if command[1:] else alone,
            env=ENV,
            models={"*haiku*": "side job"},
            notes=("CLAUDE_CODE_MAX_OUTPUT_TOKENS must leave room in the policy's context (docs/agents.md).",),
        )


HARNESS = ClaudeCode()
