"""verl's checkpoint becomes one of agl's: a folder that names the weights and commits what was trained into them.

verl writes `global_step_<n>` with model, optimizer, RNG, data loader and, when asynchronous, the groups in its
queue. Only when that is whole does the folder of the policy's version get its place, in one rename: `state.json`, the
policy in Hugging Face layout as hard links to verl's files, and `verl`, a link to verl's folder. A run resumes from
that alone.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import transfer_queue
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

from agl_runtime.trainer import state
from agl_runtime.trainer.backends.verl.follow import batch_line
from agl_runtime.trainer.backends.verl.records import GroupRecord
from agl_runtime.trainer.backends.verl.resume import VERL_LINK, link_verl
from agl_runtime.trainer.backends.verl.setup import Setup
from agl_runtime.trainer.metrics import Line, Times, untold


class CheckpointCommit(CheckpointCallback):  # type: ignore[misc]  # verl ships no types
    """Made by verl, and called when its checkpoint is written."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._setup = Setup.read(config.trainer.v1.sampler.sampler_kwargs.setup)
        self._events = self._setup.events()
        self._groups: dict[str, GroupRecord] = {}
        self._next_group = 0
        self._consumed: list[str] = []
        self._line: Line = {}

    def on_save(self, trainer: Any, global_step: int, checkpoint_dir: str, **_: Any) -> None:
        """Raises TrainerError when the folder cannot be written."""
        self._catch_up()
        project, version = self._setup.project, self._setup.weights(global_step)
        saved = state.SavedState(
            run_id=self._setup.run_id,
            run_epoch=self._setup.run_epoch,
            version=str(version),
            updates=global_step,
            step=global_step,
            next_group=self._next_group,
            open=self._under_way(),
            consumed=self._consumed,
            line=self._line,
        )
        folder = state.checkpoint_folder(project.state_dir, version)
        with state.placing(folder) as partial:
            link_verl(partial, Path(checkpoint_dir))
            for file in sorted((Path(checkpoint_dir) / "actor" / "huggingface").glob("*")):
                _link(file, partial / file.name)
            (partial / state.STATE_FILE).write_text(saved.model_dump_json(), encoding="utf-8")
        asyncio.run(self._record(saved, folder))
        self._consumed = []
        self._setup.tell("saved", step=global_step)
        state.prune_checkpoints(project.state_dir, self._setup.run_id, project.config.train.keep_checkpoints)
        prune_verl(self._setup)

    def _catch_up(self) -> None:
        """What was trained since the last checkpoint, by what the sampler told in this run epoch."""
        for event in self._events.fresh():
            match event["kind"]:
                case "group":
                    self._groups[event["uid"]] = GroupRecord.parse(event)
                case "dispatched":
                    self._next_group = max(self._next_group, 1 + max(event["numbers"]))
                case "batch" | "skipped" if event["epoch"] == self._setup.run_epoch:
                    groups = [self._groups.pop(uid) for uid in event["uids"]]
                    self._consumed += [item.rollout_id for group in groups for item in group.rollouts]
                    if event["kind"] == "batch":  # verl tells its figures later, when it has validated too
                        self._line = untold(batch_line(self._setup, event, groups, {}, Times()))

    def _under_way(self) -> list[tuple[int, str]]:
        tags = (transfer_queue.kv_list("train") or {}).get("train", {})
        return sorted((tag["number"], tag["version"]) for tag in tags.values() if tag.get("is_prompt"))

    async def _record(self, saved: state.SavedState, folder: Path) -> None:
        async with self._setup.client() as client:
            await client.record_checkpoint(saved.record(folder))


def prune_verl(setup: Setup) -> None:
    """Remove verl's folders that no checkpoint names any more."""
    named = {(item.folder / VERL_LINK).resolve() for item in state.checkpoints(setup.project.state_dir)}
    for folder in setup.checkpoints.glob("global_step_*"):
        if folder.resolve() not in named:
            shutil.rmtree(folder)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # another file system
        shutil.copyfile(source, target)
