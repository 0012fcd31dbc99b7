"""What the pieces of agl inside verl's processes know of the run, and how they tell the trainer what happens.

verl makes each piece by itself from its own configuration, which it also sends to trackers; so that holds no more than
the path of one private file, `setup.json`, where all else stands. What happened is appended to `events.jsonl` beside
it, one JSON object a line: dispatched, group, dropped, skipped, batch, held, serving, validating, validation, saved. A
process that must end the run says why in the file `end` of its run epoch; the sampler looks there while it waits.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, cast

from pydantic import BaseModel

from agl_runtime.client import GatewayClient
from agl_runtime.config import Config, Project
from agl_runtime.errors import TrainerError
from agl_runtime.part import admin_key, gateway_url
from agl_runtime.schemas import PolicyVersion

FOLDER = "verl"
SETUP_FILE = "setup.json"
EVENTS_FILE = "events.jsonl"
CHECKPOINTS = "checkpoints"
SERVER_KEY = "AGL_VERL_SERVER_KEY"
RUN_EPOCH = "AGL_VERL_RUN_EPOCH"
"""Environment variables for agl's own rollout server: the key that it wants, and the epoch of its policy versions."""

log = logging.getLogger(__name__)


def run_folder(project: Project, run_id: str) -> Path:
    return project.state_dir / FOLDER / run_id


class Ending(BaseModel):
    """Why the run ends before its last step: `kind` is stopped, no_signal or failed."""

    kind: str
    what: str = ""
    fix: str = ""


class RunEnded(TrainerError):
    """Ends verl's loop from within; the ending says why."""


class Setup(BaseModel):
    """`step` and `version` (as text) are those of the checkpoint that the run goes on from; `open` has number and
    version of each group that was under way then."""

    root: Path
    config: dict[str, Any]
    run_id: str
    run_epoch: int
    step: int = 0
    version: str = "0.0"
    open: list[tuple[int, str]] = []

    @classmethod
    def read(cls, file: str | Path) -> Setup:
        return cls.model_validate_json(Path(file).read_bytes())

    def write(self) -> Path:
        """Readable by its owner only: the configuration may hold what the agent must not show."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self.folder / SETUP_FILE
        file.unlink(missing_ok=True)
        file.touch(mode=0o600)
        file.write_text(self.model_dump_json(), encoding="utf-8")
        return file

    @cached_property
    def project(self) -> Project:
        return Project(self.root, Config.model_validate(self.config), {})

    @property
    def folder(self) -> Path:
        return run_folder(self.project, self.run_id)

    @property
    def checkpoints(self) -> Path:
        """Where verl writes `global_step_<n>`."""
        return self.folder / CHECKPOINTS

    def weights(self, step: int) -> PolicyVersion:
        """The name of the weights after `step` updates, by the run epoch that made them."""
        return PolicyVersion.parse(self.version) if step == self.step else PolicyVersion(self.run_epoch, step)

    def client(self) -> GatewayClient:
        state_dir = self.project.state_dir
        return GatewayClient(gateway_url(state_dir), admin_key(state_dir))

    def tell(self, kind: str, **data: Any) -> None:
        """Append one event. It begins a line of its own, also after one that a full disk cut off."""
        line = "\n" + json.dumps({"kind": kind, "epoch": self.run_epoch, **data}) + "\n"
        with (self.folder / EVENTS_FILE).open("a", encoding="utf-8") as handle:
            handle.write(line)

    def events(self) -> Lines:
        """What was told in this run, by all its processes so far."""
        return Lines(self.folder / EVENTS_FILE)

    def ask_to_end(self, ending: Ending) -> None:
        """The first to say so counts."""
        fresh = self.folder / f".end-{os.getpid()}"
        fresh.write_text(ending.model_dump_json(), encoding="utf-8")
        if not self._end_file.exists():
            fresh.replace(self._end_file)

    def end(self, ending: Ending) -> NoReturn:
        self.ask_to_end(ending)
        raise RunEnded(ending.what or "The run is asked to stop.", ending.fix)

    def ending(self) -> Ending | None:
        try:
            return Ending.model_validate_json(self._end_file.read_bytes())
        except FileNotFoundError:
            return None

    @property
    def _end_file(self) -> Path:
        return self.folder / f"end-{self.run_epoch}.json"


class Lines:
    """Reads a file of JSON lines while it grows; a line that is still being written waits, and one that was cut off is
    left out: whoever wrote it has failed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0

    def fresh(self) -> Iterator[Mapping[str, Any]]:
        """What came since the last time; at first everything."""
        if not self._file.exists():
            return
        with self._file.open("rb") as handle:
            handle.seek(self._offset)
            for line in handle:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if line.strip() and (found := _whole(line)) is not None:
                    yield found


def _whole(line: bytes) -> Mapping[str, Any] | None:
    try:
        return cast(Mapping[str, Any], json.loads(line))
    except ValueError:
        log.warning("an event was cut off: %r", line[:80])
        return None
