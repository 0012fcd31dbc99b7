"""`agl rollouts`: list, show and export what was recorded. Works whether or not something runs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_cli import diagnostics, output, recorded
from agl_cli.netproof import Proof
from agl_cli.options import HERE, AsJson, ProjectDir
from agl_cli.project import open_project
from agl_cli.recorded import Filter, Recorded
from agl_cli.session import open_session
from agl_cli.supervisor import part_command
from agl_runtime.client import GatewayClient
from agl_runtime.config import Project
from agl_runtime.schemas import RolloutState

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


class Mode(StrEnum):
    TRAIN = "train"
    VAL = "val"


class Format(StrEnum):
    RAW = "raw"
    SFT = "sft"


States = Annotated[list[RolloutState] | None, typer.Option("--state", help="Only in this state; repeatable.")]
OfMode = Annotated[Mode | None, typer.Option("--mode", help="Only training or only validation rollouts.")]
OfStep = Annotated[int | None, typer.Option("--step", help="Only those enqueued for this step.")]


@app.callback()
def rollouts() -> None:
    """List, show and export what was recorded."""


@app.command("list", hidden=True)
@app.command()
def ls(
    project: ProjectDir = HERE,
    state: States = None,
    mode: OfMode = None,
    step: OfStep = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="The newest so many; 0 for all.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List rollouts, oldest first, with their rewards."""
    opened = open_project(project)

    async def rows() -> list[dict[str, Any]]:
        async with _gateway(opened) as client:
            found = await recorded.find(client, _filter(state, mode, step), limit)
            values = await recorded.rewards(client, found)
        return [recorded.row(item, reward) for item, reward in zip(found, values, strict=True)]

    found = asyncio.run(rows())
    if as_json:
        output.emit_json(found)
    elif found:
        output.emit_table(
            ("rollout", "state", "mode", "step", "task", "reward", "error"), [tuple(r.values()) for r in found]
        )
    else:
        diagnostics.note("No such rollout is recorded.")


@app.command()
def show(
    rollout: Annotated[str, typer.Argument(help="Its id, as `agl rollouts ls` names it.")],
    project: ProjectDir = HERE,
    as_json: AsJson = False,
) -> None:
    """Show one rollout: its outcome, conversations, calls with what makes them trainable or not, and samples."""
    opened = open_project(project)

    async def item() -> Recorded:
        async with _gateway(opened) as client:
            return await recorded.fetch(client, rollout, opened)

    render(recorded.diagnosed(asyncio.run(item()), opened), as_json=as_json)


@app.command()
def export(
    project: ProjectDir = HERE,
    form: Annotated[
        Format, typer.Option("--format", help="raw: whole rollouts with events and calls; sft: conversations.")
    ] = Format.RAW,
    state: States = None,
    mode: Annotated[
        Mode | None,
        typer.Option("--mode", help="Only training or only validation rollouts; train for sft unless given."),
    ] = None,
    step: OfStep = None,
    least_reward: Annotated[
        float | None, typer.Option("--min-reward", help="Only with at least this reward; 1 for sft unless given.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--output", "-o", help="A file instead of stdout.")] = None,
) -> None:
    """Write recorded rollouts as JSON Lines: everything, or as supervised data the conversations that went well, in
    chat form whatever API the agent spoke."""
    opened = open_project(project)
    if form is Format.SFT:
        mode = mode or Mode.TRAIN  # held-out tasks are to be measured on
        least_reward = 1.0 if least_reward is None else least_reward

    async def write() -> int:
        count = 0
        with to.open("w", encoding="utf-8") if to else nullcontext(sys.stdout) as file:
            async with _gateway(opened) as client:
                for item in await recorded.find(client, _filter(state, mode, step), 0):
                    whole = await recorded.fetch(client, item.rollout_id, opened)
                    reward = whole.calls.reward
                    if least_reward is not None and (reward is None or reward < least_reward):
                        continue
                    for row in recorded.sft_rows(whole) if form is Format.SFT else [recorded.raw_row(whole)]:
                        output.emit_json_line(row, file)
                        count += 1
        return count

    count = asyncio.run(write())
    diagnostics.note(f"{output.counted(count, 'line')}.")
    if not count and least_reward is not None:
        diagnostics.note(f"  Only rollouts with a reward of at least {least_reward:g} count; see --min-reward.")


def render(item: Recorded, *, as_json: bool, network: Proof | None = None) -> None:
    """Print one rollout; also what `agl run` ends with, with the proof of `--prove`."""
    value = recorded.as_json(item)
    if as_json:
        value |= {"network": asdict(network)} if network else {}
        output.emit_json(value)
        return
    for name in ("rollout_id", "state", "mode", "step", "task_id", "reward", "reward_parts", "error"):
        if value[name] not in (None, {}):
            output.emit(f"{name.replace('_', ' '):<13} {output.compact(value[name])}")
    _render_agent(value["agent"])
    for number, messages in enumerate(value["conversations"], start=1):
        output.emit(f"\nconversation {number}")
        for message in messages:
            for line in recorded.message_lines(message):
                output.emit(f"  {line}")
    _render_calls(value)
    if network:
        output.emit(str(network))


def _render_agent(agent: Mapping[str, Any]) -> None:
    if not agent:
        return
    ended_by = "timed out" if agent.get("timed_out") else "over its disk space" if agent.get("over_disk") else None
    ending = ended_by or f"exit code {agent.get('exit_code')}"
    used = f"{agent.get('cpu_s') or 0:.2f} CPU s, {agent.get('max_rss_mb') or 0:.0f} MB"
    output.emit(f"{'agent':<13} {ending} after {agent.get('duration_s') or 0:.1f} s ({used})")
    for name in ("stdout", "stderr"):
        if text := str(agent.get(f"{name}_tail") or "").strip():
            output.emit(f"{name:<13} {text.splitlines()[-1]}")


def _render_calls(value: Mapping[str, Any]) -> None:
    output.emit()
    columns = ("call", "asked for", "prompt", "sampled", "weights", "trainable", "finish")
    rows = [
        (
            call["call_id"],
            call["model"],
            call["prompt_tokens"],
            call["sampled_tokens"],
            " ".join(dict.fromkeys(call["versions"])),
            "yes" if call["trainable"] else f"no: {call['reason']}",
            call["finish_reason"],
        )
        for call in value["calls"]
    ]
    if rows:
        output.emit_table(columns, rows)
    else:
        output.emit("The agent made no model call.")
    for call in value["calls"]:
        if call["error"]:
            output.emit(f"{call['call_id']}: {call['error']}")
    for call_id in value["incomplete_calls"]:
        output.emit(f"{call_id} was sent on and its answer never recorded")
    for number, sample in enumerate(value["samples"], start=1):
        why = f"; it broke off an earlier one: {sample['split']}" if sample["split"] else ""
        why = "; a conversation of its own" if sample["split"] == "other" else why
        cut = "; cut at train.max_response_tokens" if sample["truncated"] else ""
        output.emit(
            f"sample {number}: {sample['tokens']} tokens, {sample['trained_tokens']} trained, "
            f"of {output.counted(len(sample['calls']), 'call')}{why}{cut}"
        )
        broke = sample["broke"]
        if broke and broke["before"] and broke["cause"] != "other":
            before, was, now = (json.dumps(broke[name], ensure_ascii=False) for name in ("before", "was", "now"))
            output.emit(f"  behind {before} {broke['earlier']} went on with {was}, {broke['call']} with {now}")
    report, origin = value["report"], value["continuity"]
    for name in ("splits", "dropped"):
        for cause, count in report[name].items():
            output.emit(f"{name}: {count} because of {cause}. {origin['remedies'][cause]}")
    if report["splits"]:
        output.emit(
            f"harness {origin['harness']} over {', '.join(origin['dialects'])}, template of {origin['template']}"
        )
    if sampled := report["sampled_tokens"]:
        trained = report["trained_tokens"]
        output.emit(f"trainable: {trained} of {sampled} sampled tokens ({trained / sampled:.0%})")
    for reason, count in report["untrained"].items():
        output.emit(f"untrained: {count} because of {reason}")


def _filter(state: list[RolloutState] | None, mode: Mode | None, step: int | None) -> Filter:
    return Filter(tuple(state or RolloutState), mode.value if mode else None, step)


@asynccontextmanager
async def _gateway(project: Project) -> AsyncIterator[GatewayClient]:
    async with open_session(project, [part_command("gateway", project.root, ())], "rollouts") as session:
        yield session.client
