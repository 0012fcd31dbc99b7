"""Codex, where the agent's command names it.

No variable redirects it, so that a shell puts the rollout's address into its configuration, after the command's own
words. `codex` by itself becomes a headless run on the task. The end of a run is its exit code and its last event.
"""

from __future__ import annotations

from pathlib import Path

from agl_cli.harnesses.base import Integration, Repository, task_field

REDIRECT = (
    'exec "$@" -c model=policy -c model_provider=agl -c model_providers.agl.name=agl'
    " -c model_providers.agl.wire_api=responses -c model_providers.agl.env_key=OPENAI_API_KEY"
    ' -c model_providers.agl.base_url="$OPENAI_BASE_URL"'
)
ARGUMENTS = ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


class Codex:
    def integrate(self, repository: Repository, command: tuple[str, ...]) -> Integration | None:
        if not command or Path(command[0]).name != "codex":
            return None
        words = command if command[1:] else (*command, *ARGUMENTS, task_field(repository))
        return Integration(
            harness="Codex",
            evidence="given by --command",
            command=("sh", "-c", REDIRECT, "sh", *words),
            notes=(
                "Codex does not compact when the context overflows: give it the policy's with "
                "-c model_context_window=N -c model_auto_compact_token_limit=M (docs/agents.md).",
            ),
        )


HARNESS = Codex()
