"""What the three parts (gateway, controller, trainer) share as processes: arguments, files in `.agl`, signals, status.

A part is started as `python -m agl_runtime.<part> --root PROJECT [--set path=value ...]`. SIGTERM and SIGINT ask it to
stop gracefully; with `--with-parent` so does the end of the process that started it.
Its files in the project's state folder:

    key                        the gateway's admin key, readable by its owner only
    store.sqlite3              the store
    run/gateway.json           where the gateway listens: {"url", "pid"}
    logs/{gateway,controller,trainer}.log
    rollouts/<id>/<attempt>/   workspace, HOME, output of one attempt
    checkpoints/<version>/     the policy in Hugging Face layout, and the trainer's state
    metrics.jsonl summary.json what training measured
    verl/<run>/ trackers/      of the verl backend: its own files, and what trackers keep
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agl_runtime import logs
from agl_runtime.client import GatewayClient
from agl_runtime.config import Project, load_project
from agl_runtime.errors import PreconditionError

KEY_FILE = "key"
STORE_FILE = "store.sqlite3"
GATEWAY_FILE = "run/gateway.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
PARENT_GRACE_S = 15.0
MOST_DESCRIPTORS = 2**16


@dataclass(frozen=True)
class Part:
    """A part that has read its arguments."""

    project: Project
    args: argparse.Namespace
    admin_key: str


def begin(name: str, argv: Sequence[str] | None = None, extra: argparse.ArgumentParser | None = None) -> Part:
    """Parse the arguments, load the project, read or make the admin key, set logging up. Raises ConfigError."""
    allow_many_descriptors()
    parser = argparse.ArgumentParser(prog=f"agl_runtime.{name}", parents=[extra] if extra else [])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--with-parent", action="store_true", help="stop when standard input closes")
    args = parser.parse_args(argv)
    if args.with_parent:
        stop_with_parent()
    overrides = dict(item.split("=", 1) for item in args.set)
    project = load_project(args.root, overrides=overrides)
    key = admin_key(project.state_dir)
    upstream_key = project.config.model.api_key
    logs.configure(secrets=[key, upstream_key.get_secret_value() if upstream_key else ""])
    return Part(project, args, key)


def allow_many_descriptors() -> None:
    """Every agent takes some in the controller and in the gateway, and the usual 1024 would end at 170 agents. What
    this process starts inherits it."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_DESCRIPTORS)), hard))


def stop_with_parent() -> None:
    """Ask this process to stop once standard input closes (whoever held its other end is gone), and end it when it
    has not stopped after PARENT_GRACE_S. What this process starts gets no end of that pipe."""
    pipe = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def watch() -> None:
        while os.read(pipe, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PARENT_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises PreconditionError in place of the OSError of a folder that is read-only, or of a disk that is full."""
    try:
        yield
    except OSError as error:
        raise PreconditionError(
            f"{folder} cannot be written: {error.strerror}.", "Make it writable for you, with free disk space."
        ) from error


def make_state_dir(state_dir: Path) -> None:
    """For its owner alone, and out of git's sight: it holds the admin key."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (state_dir / ".gitignore").exists():
        (state_dir / ".gitignore").write_text("*\n", encoding="utf-8")


def admin_key(state_dir: Path) -> str:
    """Read the admin key, or make it: the first of several parts that start together wins. Raises PreconditionError."""
    with writing(state_dir):
        return _admin_key(state_dir)


def _admin_key(state_dir: Path) -> str:
    make_state_dir(state_dir)
    file = state_dir / KEY_FILE
    fresh = state_dir / f"{KEY_FILE}.{os.getpid()}"
    if not file.exists():
        fresh.touch(mode=0o600)
        fresh.write_text(f"agl-admin-{secrets.token_urlsafe(32)}", encoding="ascii")
        try:
            with contextlib.suppress(FileExistsError):  # another part was first; its key counts
                os.link(fresh, file)
        finally:
            fresh.unlink()
    return file.read_text(encoding="ascii").strip()


def announce_gateway(state_dir: Path, url: str) -> None:
    file = state_dir / GATEWAY_FILE
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({"url": url, "pid": os.getpid()}), encoding="utf-8")
    fresh.replace(file)


def gateway_url(state_dir: Path) -> str:
    """Where the gateway said it listens. Raises PreconditionError when it has not."""
    try:
        return str(json.loads((state_dir / GATEWAY_FILE).read_text(encoding="utf-8"))["url"])
    except (OSError, ValueError, KeyError) as error:
        raise PreconditionError("No gateway runs for this project.", "Start one with `agl up`.") from error


async def connect(part: Part, *, patience_s: float = 60.0) -> GatewayClient:
    """A client of the project's gateway, once that gateway has announced itself."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return GatewayClient(gateway_url(part.project.state_dir), part.admin_key, patience_s=patience_s)
        except PreconditionError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


def stop_event() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; call it inside the running loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
