"""`agl export`: the policy of a checkpoint as a folder of its own, in Hugging Face layout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_cli import output
from agl_cli.options import HERE, AsJson, ProjectDir
from agl_cli.project import open_project
from agl_runtime.errors import ConfigError, PreconditionError, TrainerError
from agl_runtime.trainer import state
from agl_runtime.trainer.estimate import tensors

NOT_THE_POLICY = {state.STATE_FILE, "trainer.pt", "verl"}
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def export(
    folder: Annotated[Path, typer.Argument(help="Where to; must not exist yet.")],
    version: Annotated[str | None, typer.Option("--version", help="Of which checkpoint; the newest.")] = None,
    project: ProjectDir = HERE,
    as_json: AsJson = False,
) -> None:
    """Write the policy of a checkpoint into a folder in Hugging Face layout, which vLLM and transformers load."""
    found = _checkpoint(open_project(project).state_dir, version)
    if folder.exists():
        raise ConfigError(f"{folder} exists already.", "Name a folder that does not.")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if list(found.folder.glob("*.safetensors")):
        shutil.copytree(found.folder, partial, ignore=lambda _, names: NOT_THE_POLICY & set(names))
    else:
        _merge(found.folder / "verl" / "actor", partial)
    _tell_dtype(partial)
    partial.rename(folder)
    if as_json:
        output.emit_json({"version": str(found.version), "step": found.saved.step, "folder": str(folder.resolve())})
    else:
        output.emit(f"{folder}: version {found.version}, after step {found.saved.step}")


def _checkpoint(state_dir: Path, version: str | None) -> state.Checkpoint:
    there = state.checkpoints(state_dir)
    wanted = [item for item in there if version in (None, str(item.version))]
    if wanted:
        return wanted[-1]
    if version:
        names = ", ".join(str(item.version) for item in there)
        raise ConfigError(f"There is no checkpoint {version}.", f"Name one of: {names}." if names else "Train first.")
    raise PreconditionError("There is no checkpoint yet.", "Train one with `agl up`.")


def _merge(actor: Path, target: Path) -> None:
    """Put the shards that verl wrote together, by verl's own program."""
    backend = "fsdp" if (actor / "fsdp_config.json").exists() else "megatron"
    command = ["-m", "verl.model_merger", "merge", "--backend", backend, "--local_dir", str(actor)]
    done = subprocess.run(
        [sys.executable, *command, "--target_dir", str(target)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TrainerError(f"verl could not merge {actor}: {reason}.", "Run this where verl is installed.")


def _tell_dtype(folder: Path) -> None:
    """config.json says of what type most of the weights are. verl's says bfloat16 whatever they are, and transformers
    would round them when it loads them."""
    sizes: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        for dtype, size in tensors(file):
            sizes[dtype] += size
    if sizes and (stored := DTYPES.get(max(sizes, key=sizes.__getitem__))):
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(_with_dtype(config, stored), indent=2) + "\n", encoding="utf-8")


def _with_dtype(config: dict[str, Any], stored: str) -> dict[str, Any]:
    """Also in the sections of a model that sees; "torch_dtype" is what the key was called before."""
    said = {key: _with_dtype(value, stored) if isinstance(value, dict) else value for key, value in config.items()}
    return said | {key: stored for key in ("dtype", "torch_dtype") if said.get(key) in DTYPES.values()}
