"""`agl config show`: every effective value and where it came from."""

from __future__ import annotations

from typing import Any

import typer
from pydantic import SecretStr

from agl_cli import diagnostics, output, verl
from agl_cli.options import HERE, AsJson, ProjectDir, Settings
from agl_cli.project import open_project
from agl_runtime.config import Project, setting_paths
from agl_runtime.errors import ConfigError

HIDDEN = "***"

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def config() -> None:
    """Show every setting and where its value came from."""


@app.command()
def show(project: ProjectDir = HERE, settings: Settings = None, as_json: AsJson = False) -> None:
    """Show every setting, its effective value and its origin: a flag, the environment, agl.yaml or the default. With
    the verl backend also what verl is told, with the setting that decides it as origin."""
    opened = open_project(project, settings)
    rows = effective(opened)
    if verl.is_chosen(opened):
        try:
            rows += verl.effective(opened)
        except ConfigError as error:  # also a model that is still to be fetched
            diagnostics.problem(f"What verl is told cannot be shown: {error.what}", error.fix, level="Warning")
    if as_json:
        output.emit_json(rows)
    else:
        shown = (row | {"value": output.compact(row["value"])} for row in rows)
        output.emit_table(("setting", "value", "from"), [tuple(row.values()) for row in shown])


def effective(project: Project) -> list[dict[str, Any]]:
    """One object a setting: `setting`, `value` (secrets hidden), `origin`."""
    rows = []
    for path in setting_paths():
        section, name = path.split(".")
        value = getattr(getattr(project.config, section), name)
        rows.append({"setting": path, "value": _plain(path, value), "origin": _origin(project, path)})
    return rows


def _origin(project: Project, path: str) -> str:
    """A mapping such as agent.env is set key by key."""
    found = [origin for name, origin in project.origins.items() if name == path or name.startswith(f"{path}.")]
    return ", ".join(dict.fromkeys(found)) or "default"


def _plain(path: str, value: Any) -> Any:
    if isinstance(value, SecretStr):
        return HIDDEN
    if path == "agent.env":  # may hold keys of services that the agent uses
        return dict.fromkeys(value, HIDDEN)
    return value
