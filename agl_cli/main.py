"""The Typer app `agl`. Starting it, `agl --help` and `agl --version` import nothing but Typer.

Each command lives in `agl_cli.commands.<name>`, loaded only when it is run or asked for its own help. Such a module
defines either a function of the command's name, with Typer's annotations, or `app`, a `typer.Typer` with commands of
its own. The one-line helps stand here so that the list of commands needs none of the modules.

A command raises `AglError`, or lets pass what the system says of a file; the group turns either into a message and an
exit code (`diagnostics`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "demo": "Watch the example agent learn on this machine's CPU.",
    "init": "Prepare the agent in this folder for training.",
    "run": "Run one rollout and show its calls and samples.",
    "up": "Train, with live progress; run again to resume.",
    "down": "Stop what `agl up` started.",
    "status": "Show the state of each part, step and reward.",
    "logs": "Show the logs of the parts.",
    "rollouts": "List, show and export what was recorded.",
    "eval": "Measure a policy on the validation tasks.",
    "export": "Write a checkpoint's policy in Hugging Face layout.",
    "doctor": "Check all that a run needs, with remedies.",
    "config": "Show every setting and where its value came from.",
}
DEBUG_VARIABLE = "AGL_CLI_DEBUG"


class _Commands(Mapping[str, Any]):
    """The commands by name, each imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        module = importlib.import_module(f"agl_cli.commands.{name}")
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        if not hasattr(module, "app"):
            single.command(name)(getattr(module, name))
        command = typer.main.get_command(getattr(module, "app", single))
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyGroup(TyperGroup):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Commands()  # type: ignore[assignment]  # read only: nothing is added to this group

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: Any) -> Any:
        from agl_runtime.errors import AglError, PreconditionError

        try:
            if sys.platform == "win32":
                raise PreconditionError("agl does not run on Windows itself.", "Use it in WSL, or on Linux or macOS.")
            return super().invoke(ctx)
        except (AglError, KeyboardInterrupt, OSError) as error:
            from agl_cli import diagnostics

            if isinstance(error, OSError) and error.filename is None:
                raise
            raise typer.Exit(diagnostics.report(error)) from error


app = typer.Typer(
    cls=LazyGroup,
    name="agl",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"agl {version('agl')}")
        raise typer.Exit


@app.callback()
def agl(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Improve the open-weight model behind your agent by reinforcement learning, with its harness unchanged."""


def main() -> None:
    """The console script. An error that nobody foresaw ends in one sentence, or in its traceback when debugging."""
    try:
        app()
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        from agl_cli import diagnostics

        sys.exit(diagnostics.fault(error))


if __name__ == "__main__":
    main()
