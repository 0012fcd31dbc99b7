"""`agl status`: what runs here, how far it is, and what was recorded."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from agl_cli import output
from agl_cli.options import HERE, AsJson, ProjectDir
from agl_cli.progress import pass_at_1, row_line
from agl_cli.project import MetricsTail, last_of, open_project, read_summary
from agl_cli.runstate import Record, read_record
from agl_runtime.client import GatewayClient
from agl_runtime.config import Project
from agl_runtime.errors import GatewayError, PreconditionError
from agl_runtime.part import STORE_FILE, admin_key, gateway_url

SILENT_S = 15.0


def status(project: ProjectDir = HERE, as_json: AsJson = False) -> None:
    """Show the state of each part, the step, the reward, what is waited for, and calls that cannot be trained on."""
    opened = open_project(project)
    value = asyncio.run(look(opened))
    if as_json:
        output.emit_json(value)
    else:
        _show(value)
        if value["rollouts"] is None and (opened.state_dir / STORE_FILE).exists():
            output.emit("Recorded rollouts and calls are counted only while the gateway runs; see `agl rollouts ls`.")


async def look(project: Project) -> dict[str, Any]:
    """`running` is null when nothing runs; then `parts` is empty. Counts are null unless the gateway, which alone reads
    the store, answers."""
    record = read_record(project.state_dir)
    parts, counts = await _ask(project) if record else ([], {})
    calls = {name.removeprefix("calls."): n for name, n in counts.items() if name.startswith("calls.") and n}
    rollouts = {name.removeprefix("rollouts."): n for name, n in counts.items() if name.startswith("rollouts.")}
    rows = MetricsTail(project.state_dir).read()
    return {
        "running": _running(record) if record else None,
        "parts": parts,
        "rollouts": rollouts if counts else None,
        "running_calls": calls.pop("running", 0) if counts else None,
        "trainable_calls": calls.pop("trainable", 0) if counts else None,
        "untrainable_calls": calls if counts else None,
        "last_step": last_of(rows, "step"),
        "last_validation": last_of(rows, "validation"),
        "summary": read_summary(project.state_dir),
    }


def _running(record: Record) -> dict[str, Any]:
    return {"command": record.command, "pid": record.holder.pid, "seconds": round(time.time() - record.started_at)}


async def _ask(project: Project) -> tuple[list[dict[str, Any]], dict[str, int]]:
    try:
        url = gateway_url(project.state_dir)
        async with GatewayClient(url, admin_key(project.state_dir), patience_s=2) as client:
            parts, counts = await client.parts(), await client.counts()
    except (PreconditionError, GatewayError) as error:
        return [{"part": "gateway", "state": "unreachable", "waiting_for": None, "detail": {"error": error.what}}], {}
    now = time.time()
    silent = {part.part for part in parts if now - part.updated_at > SILENT_S}
    return [part.model_dump() | ({"state": "silent"} if part.part in silent else {}) for part in parts], counts


def _show(value: dict[str, Any]) -> None:
    running = value["running"]
    if running is None:
        output.emit("Nothing runs here.")
    else:
        output.emit(f"`agl {running['command']}` runs (process {running['pid']}, {running['seconds']} s).")
        rows = [(part["part"], part["state"], part["waiting_for"], _detail(part["detail"])) for part in value["parts"]]
        output.emit_table(("part", "state", "waits for", "detail"), rows)
    for name in ("last_step", "last_validation"):
        if value[name] is not None:
            output.emit(str(row_line(value[name])))
    for name in ("rollouts", "untrainable_calls"):
        if value[name]:
            output.emit(f"{name.replace('_', ' ')}: {_detail(value[name])}")
    summary = value["summary"]
    if summary is not None:
        reached = f", {pass_at_1(summary['after'])}" if summary["after"] else ""
        steps = f" after {output.counted(summary['steps'], 'step')}" if summary["mode"] == "train" else ""
        output.emit(f"last {summary['mode']}: {summary['ended']}{steps}{reached}")
        if summary["reason"]:
            output.emit(summary["reason"])


def _detail(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {output.compact(value)}" for name, value in values.items() if value is not None)
