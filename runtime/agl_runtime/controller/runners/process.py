"""Runs agents as processes of this machine, each in its own workspace, with its own HOME, sandboxed where possible."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agl_runtime.config import Project
from agl_runtime.controller.runners import environment, workspace
from agl_runtime.controller.runners.base import AgentRun
from agl_runtime.controller.runners.command import TaskPlace, render, split_command, uses_task_file
from agl_runtime.controller.runners.disk import DiskLimit
from agl_runtime.controller.runners.environment import TREE_VARIABLE, Installation
from agl_runtime.controller.runners.isolation import MASK, Isolation, View
from agl_runtime.controller.runners.tree import Command, Tree, kill_marked
from agl_runtime.controller.runners.warm import Helper, WarmStarts
from agl_runtime.controller.runners.workspace import AttemptFolder, Repository
from agl_runtime.errors import ConfigError, RunnerError
from agl_runtime.schemas import Grant

log = logging.getLogger(__name__)

ROLLOUTS = "rollouts"
WORKSPACES_KEPT = 64
OUTPUTS_KEPT = 2000
TAIL = 500


class ProcessRunner:
    """Implements `Runner`. `environ` is the user's environment, `agl` where agl itself is installed. Keeps the newest
    workspaces, and what agents printed for longer.

    Raises RunnerError on Windows, and ConfigError for a command or home file that is not there.
    """

    def __init__(
        self,
        project: Project,
        gateway_url: str,
        isolation: Isolation,
        *,
        environ: Mapping[str, str] = os.environ,
        agl: Installation | None = None,
    ) -> None:
        if sys.platform == "win32":
            raise RunnerError("Agents cannot run as processes of native Windows.", "Run agl inside WSL.")
        self._root = project.root.resolve()
        self._agent = project.config.agent
        self._gateway_url = gateway_url
        self._isolation = isolation
        self._state_dir = project.state_dir.resolve()
        self._passed = environment.passed(environ, self._agent.pass_env, agl or Installation.current())
        self._home_files = _home_files(self._agent.home_files, Path(environ.get("HOME", "/")))
        self._words = split_command(self._agent.command)
        if "{" not in self._words[0] and os.sep not in self._words[0]:
            self._program(self._words[0], self._root)
        self._warm = self._warm_starts() if self._agent.warm else None
        self._task_files = _within(project, project.config.data.train, project.config.data.val)
        self._withheld = (*self._task_files, *_within(project, project.config.model.path))
        self._repository = Repository.find(self._root) if self._agent.workspace != "empty" else None
        self._judged: dict[AttemptFolder, None] = {}
        self._emptied: dict[AttemptFolder, None] = {}

    @property
    def isolation(self) -> str:
        return str(self._isolation)

    @property
    def starts(self) -> str:
        return "cold" if self._warm is None else str(self._warm)

    async def try_warm(self) -> RunnerError | None:
        """Make ready for warm starts; why agents start cold although they were to start warm."""
        if self._warm is None:
            return None
        await self._warm.helper()
        return self._warm.refused

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()

    def clean_up(self) -> None:
        """End what an earlier controller of this project left alive, and take over its attempts' folders. Blocks."""
        (self._state_dir / MASK).mkdir(mode=0o700, parents=True, exist_ok=True)
        kill_marked(lambda mark: mark.startswith(f"{self._state_dir}:"))
        attempts = sorted((self._state_dir / ROLLOUTS).glob("*/*/"), key=lambda path: path.stat().st_mtime)
        for folder in map(AttemptFolder, attempts):
            (self._judged if os.path.exists(folder.workspace) else self._emptied)[folder] = None
        self._make_room(*self._old())

    async def run(self, grant: Grant, expired: asyncio.Event) -> AgentRun:
        folder = self._folder(grant)
        self._judged.pop(folder, None)
        self._emptied.pop(folder, None)
        helper = None if self._warm is None else await self._warm.helper()
        try:
            command = await asyncio.to_thread(self._prepare, grant, folder, helper)
        except OSError as error:
            raise RunnerError(f"The folder {folder.root} cannot be made: {error}.", "Check the disk.") from error
        tree = Tree(command)
        disk = DiskLimit(folder, self._agent.disk_mb)
        watching = asyncio.create_task(disk.watch(expired))
        in_time = False
        try:
            in_time = await tree.wait(expired)
        finally:
            watching.cancel()
            ended = await asyncio.shield(tree.end(timed_out=not (in_time or disk.is_exceeded)))
        await disk.look()
        if in_time and not ended.is_told:
            said = ended.stderr.text[-TAIL:].strip() or "it said nothing"
            raise RunnerError(f"The agent's sandbox failed: {said}.", "Try agent.isolation: off, and see `agl doctor`.")
        return AgentRun(replace(ended.exit, over_disk=disk.is_exceeded), ended.stdout, ended.stderr, folder.workspace)

    async def release(self, grant: Grant) -> None:
        self._judged[self._folder(grant)] = None
        await asyncio.to_thread(self._make_room, *self._old())

    def _folder(self, grant: Grant) -> AttemptFolder:
        return AttemptFolder.of(self._state_dir / ROLLOUTS, grant.rollout.rollout_id, grant.attempt_id)

    def _old(self) -> tuple[list[AttemptFolder], list[AttemptFolder]]:
        """Take out the oldest attempts beyond what is kept: of their workspaces, and altogether."""
        emptied = [_take_first(self._judged) for _ in range(len(self._judged) - WORKSPACES_KEPT)]
        self._emptied.update(dict.fromkeys(emptied))
        return emptied, [_take_first(self._emptied) for _ in range(len(self._emptied) - OUTPUTS_KEPT)]

    def _make_room(self, emptied: list[AttemptFolder], gone: list[AttemptFolder]) -> None:
        """Blocks. What cannot be removed stays."""
        steps: list[Callable[[], None]] = [partial(workspace.discard, folder) for folder in emptied]
        steps += [partial(workspace.remove, folder.root) for folder in gone]
        if emptied and self._repository is not None and self._agent.workspace == "worktree":
            steps.append(self._repository.forget_worktrees)
        for step in steps:
            try:
                step()
            except (OSError, RunnerError) as error:
                log.warning("an old attempt is not removed: %s", error)

    def _warm_starts(self) -> WarmStarts:
        env = {name: value for name, value in self._agent.env.items() if "{" not in value}
        program = self._words[0] if "{" in self._words[0] else self._program(self._words[0], self._root)
        modules = [] if self._agent.warm is True else self._agent.warm or []
        words = [program, *self._words[1:]]
        return WarmStarts(words, modules, {**self._passed, **env}, self._state_dir, self._isolation)

    def _prepare(self, grant: Grant, folder: AttemptFolder, helper: Helper | None) -> Command:
        """Make the attempt's folder and the command for it. Blocks. Raises RunnerError and ConfigError."""
        rollout = grant.rollout
        cwd = workspace.make(self._agent.workspace, folder, self._root, self._repository, self._withheld)
        if uses_task_file((*self._words, *self._agent.env.values())):
            folder.task_file.write_text(json.dumps(rollout.input), encoding="ascii")
        shown = tuple((source, folder.home / name) for name, source in self._home_files.items())
        for source, target in shown:
            (workspace.copy_home_file if self._isolation.wrap is None else workspace.place_for)(source, target)
        place = TaskPlace(rollout.input, str(_task_id(grant)), str(folder.task_file))
        argv = [render(word, place, "agent.command") for word in self._words]
        argv[0] = self._program(argv[0], cwd)
        env_map = rollout.config.local.env_map if rollout.config.local else {}
        env = {
            **self._passed,
            **environment.private(folder.home, folder.tmp),
            **environment.configured(self._agent.env, place),
            **environment.mapped(env_map, place),
            **environment.gateway_variables(self._gateway_url, grant),
            TREE_VARIABLE: f"{self._state_dir}:{rollout.rollout_id}/{grant.attempt_id}",
        }
        command = Command(argv, env, cwd, folder.root, self._agent.output_limit_kb * 1024)
        view = None if self._isolation.wrap is None else self._view(folder, shown, cwd)
        if self._warm and helper and (fitted := self._warm.fitted(helper, command, view)):
            return fitted
        if self._isolation.wrap is None or view is None:
            return command
        return replace(command, argv=self._isolation.wrap(argv, view, folder.root), sandboxed=True)

    def _view(self, folder: AttemptFolder, shown: tuple[tuple[Path, Path], ...], cwd: Path) -> View:
        read_only: tuple[Path, ...] = (self._root,)
        opened: tuple[Path, ...] = ()
        if self._repository is not None:
            if not self._repository.git_dir.is_relative_to(self._root):
                read_only += (self._repository.git_dir,)
            if self._agent.workspace == "worktree":
                opened = self._repository.worktree_dirs(folder.workspace)
        own = (folder.workspace, folder.home, folder.tmp)
        emptied = tuple(path for path in self._task_files if path.is_file())
        return View(self._state_dir, own, read_only, emptied, opened, shown, cwd)

    def _program(self, name: str, cwd: Path) -> str:
        """The program's path: by the user's PATH, or relative to the workspace or else to the project."""
        if os.sep not in name:
            places = [shutil.which(name, path=self._passed["PATH"])]
        else:
            places = [str(folder / name) for folder in (cwd, self._root)]
        for place in places:
            if place is not None and os.path.isfile(place) and os.access(place, os.X_OK):
                return place
        where = "on your PATH (agl's own virtual environment is not part of it)" if os.sep not in name else "there"
        raise ConfigError(f"agent.command: no program `{name}` is {where}.", "Install it, or give its absolute path.")


def _take_first(folders: dict[AttemptFolder, None]) -> AttemptFolder:
    first = next(iter(folders))
    del folders[first]
    return first


def _task_id(grant: Grant) -> Any:
    return (grant.rollout.metadata.model_extra or {}).get("task_id", grant.rollout.rollout_id)


def _within(project: Project, *names: str | None) -> tuple[Path, ...]:
    """Those of the named paths that lie in the project."""
    named = [project.path(name).resolve() for name in names if name]
    return tuple(path for path in named if project.root.resolve() in path.parents)


def _home_files(names: list[str], home: Path) -> dict[str, Path]:
    found = {}
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts or not (home / name).exists():
            raise ConfigError(
                f"agent.home_files: {name} is no file or folder of {home}.", "Name it relative to your home."
            )
        found[name] = (home / name).resolve()
    return found
