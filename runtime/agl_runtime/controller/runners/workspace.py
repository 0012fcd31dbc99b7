"""The folder of one attempt, and the fresh working directory in it.

    .agl/rollouts/<rollout>/<attempt>/workspace    where the agent starts
                                      home tmp     its HOME and TMPDIR; tmp/task.json is its task, if it asks for it
                                      stdout stderr  what it printed (the beginning of it)

All functions block: call them in a thread.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agl_runtime.config import STATE_DIR
from agl_runtime.errors import RunnerError

CACHES = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox"})
GIT_TIMEOUT_S = 120.0
_GIT_SAFE = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")  # runs no program of the repository


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    root: Path

    @classmethod
    def of(cls, rollouts: Path, rollout_id: str, attempt_id: str) -> AttemptFolder:
        """An id is one folder name, also one that is all dots."""
        return cls(rollouts / re.sub(r"^\.+", "_", rollout_id) / re.sub(r"^\.+", "_", attempt_id))

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def task_file(self) -> Path:
        return self.tmp / "task.json"


@dataclass(frozen=True, slots=True)
class Repository:
    """The git repository around a project. `prefix` is the project's place in it ("" at its top)."""

    project: Path
    prefix: str
    git_dir: Path

    @classmethod
    def find(cls, project: Path) -> Repository | None:
        """None without git or outside a repository. Raises RunnerError when git refuses to read the one there is."""
        if shutil.which("git") is None or not any((folder / ".git").exists() for folder in (project, *project.parents)):
            return None
        prefix, git_dir = _git(project, "rev-parse", "--show-prefix", "--git-common-dir").splitlines()[:2]
        return cls(project, prefix, (project / git_dir).resolve())

    def tracked(self) -> list[str]:
        listed = _git(self.project, "ls-files", "-z", "--recurse-submodules").split("\0")
        return [name for name in listed if name and Path(name).parts[0] != STATE_DIR]

    def forgotten(self) -> list[str]:
        """Files that git neither tracks nor ignores."""
        listed = _git(self.project, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
        return [name for name in listed if name and Path(name).parts[0] != STATE_DIR]

    def add_worktree(self, target: Path) -> Path:
        """Check HEAD out into `target`; returns the project's folder in it."""
        _git(self.project, "worktree", "add", "--quiet", "--force", "--detach", str(target), "HEAD")
        return target / self.prefix

    def forget_worktrees(self) -> None:
        """Drop git's notes of worktrees whose folders are gone."""
        _git(self.project, "worktree", "prune")

    def worktree_dirs(self, target: Path) -> tuple[Path, ...]:
        """What git must write for work in the worktree `target`; its hooks and configuration are not among it."""
        own = Path((target / ".git").read_text(encoding="utf-8").removeprefix("gitdir:").strip())
        return own, *(self.git_dir / name for name in ("objects", "refs", "logs") if (self.git_dir / name).is_dir())


def _git(folder: Path, *words: str) -> str:
    """Raises RunnerError."""
    command = ["git", "-C", str(folder), *_GIT_SAFE, *words]
    try:
        done = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=GIT_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunnerError(f"git {words[0]} in {folder} failed: {error}.", "Run it by hand to see why.") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise RunnerError(f"git {words[0]} in {folder} failed: {said}.", "Correct it, or set agent.workspace: empty.")
    return os.fsdecode(done.stdout)


def make(
    kind: Literal["empty", "copy", "worktree"],
    folder: AttemptFolder,
    project: Path,
    repository: Repository | None,
    withheld: Sequence[Path] = (),
) -> Path:
    """Make the attempt's folder anew and fill its workspace; returns the agent's working directory in it. `withheld`
    are files and folders of the project that no copy holds.

    Raises RunnerError and OSError.
    """
    if folder.root.exists():
        remove(folder.root)
    for path in (folder.root, folder.home, folder.tmp):
        path.mkdir(mode=0o700, parents=True)
    if kind == "worktree":
        if repository is None:
            raise RunnerError(f"{project} is in no git repository.", "Set agent.workspace to copy or empty.")
        return repository.add_worktree(folder.workspace)
    folder.workspace.mkdir()
    if kind == "copy":
        _copy(project, own_files(project, repository), folder.workspace, withheld)
    return folder.workspace


def own_files(project: Path, repository: Repository | None) -> list[str]:
    """What git tracks of the project; every file where it tracks none, as in a folder that it ignores."""
    tracked = repository.tracked() if repository else []
    return tracked or list(untracked_files(project))


def untracked_files(project: Path) -> Iterator[str]:
    """Every file below `project`, by its relative path, but agl's state, git's, virtual environments and caches."""
    for parent, folders, files in os.walk(project):
        here = Path(parent)
        skipped = CACHES | {STATE_DIR, ".git"}
        folders[:] = [n for n in folders if n not in skipped and not (here / n / "pyvenv.cfg").exists()]
        links = [name for name in folders if (here / name).is_symlink()]
        yield from (os.path.relpath(here / name, project) for name in (*files, *links))


def _copy(source: Path, names: Iterable[str], target: Path, withheld: Sequence[Path]) -> None:
    made: set[Path] = set()
    for name in names:
        if any((source / name).is_relative_to(path) for path in withheld):
            continue
        file = target / name
        if file.parent not in made:
            file.parent.mkdir(parents=True, exist_ok=True)
            made.add(file.parent)
        try:
            shutil.copy2(source / name, file, follow_symlinks=False)
        except (FileNotFoundError, shutil.SpecialFileError):
            continue  # tracked, but deleted by the user; or a pipe, say


def copy_home_file(source: Path, target: Path) -> None:
    """A private copy of a file or folder of the user's home. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copy2(source, target)


def place_for(source: Path, target: Path) -> None:
    """An empty file or folder at `target`, for `source` to be mounted on."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()


def discard(folder: AttemptFolder) -> None:
    """Remove all but what the agent printed. Raises OSError."""
    for path in (folder.workspace, folder.home, folder.tmp):
        if path.exists():
            remove(path)


def remove(path: Path) -> None:
    """Remove a folder, also one with folders that are not writable (package caches), or nested deeper than a path is
    long: the system's own tools walk such. Raises OSError."""
    for words in (("rm", "-rf"), ("chmod", "-R", "u+rwx"), ("rm", "-rf")):
        subprocess.run([*words, "--", str(path)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        if not os.path.lexists(path):
            return
    raise OSError(f"{path} cannot be removed")
