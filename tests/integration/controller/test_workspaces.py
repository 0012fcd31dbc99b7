"""What an agent finds in its working directory, and what it can do to the repository that this came from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agl_runtime.config import Project
from agl_runtime.controller.runners.workspace import Repository
from agl_runtime.errors import RunnerError
from fakes.agents import PYTHON, SANDBOXES, WAYS, Way, git, make_project, run_agent, runner_of

LIST = "import os\nfor top, _, files in os.walk('.'):\n  for f in files: print(os.path.relpath(os.path.join(top, f)))\n"


async def listed(project: Project, way: Way = "none") -> set[str]:
    run = await run_agent(project, way)
    assert run.exit.ok, run.stderr.text
    return set(run.stdout.text.split())


async def test_an_empty_workspace_holds_nothing(tmp_path: Path) -> None:
    project = make_project(tmp_path, agent={"workspace": "empty", "command": [PYTHON, "-c", LIST]})
    assert await listed(project) == set()


async def test_a_copy_holds_the_tracked_files_as_they_are_now(tmp_path: Path) -> None:
    files = {"agent.py": LIST, "lib/a.py": "", "gone.py": "", "secret.env": "", ".gitignore": "*.env\n"}
    project = make_project(tmp_path, files)
    (tmp_path / "link").symlink_to("lib/a.py")
    (tmp_path / "run").write_text("")
    (tmp_path / "run").chmod(0o755)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "new.py").write_text("")
    assert await listed(project) == {"agent.py", "agl.yaml", "lib/a.py", ".gitignore", "link", "run"}
    workspace = project.state_dir / "rollouts/r1/0/workspace"
    assert os.readlink(workspace / "link") == "lib/a.py"
    assert os.access(workspace / "run", os.X_OK)


async def test_a_copy_of_a_folder_within_a_repository_holds_that_folder(tmp_path: Path) -> None:
    project = make_project(tmp_path / "agents" / "one", {"agent.py": LIST})
    (tmp_path / "outside").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    assert await listed(project) == {"agent.py", "agl.yaml"}


async def test_without_git_a_copy_leaves_out_state_environments_and_caches(tmp_path: Path) -> None:
    left_out = {"env/pyvenv.cfg": "", "env/lib/x.py": "", "lib/__pycache__/a.pyc": "", ".agl/key": "", ".git/x/y": ""}
    project = make_project(tmp_path, {"agent.py": LIST, "lib/a.py": "", ".env": "", **left_out})
    (tmp_path / ".git" / "x" / "y").unlink()
    (tmp_path / ".git" / "x").rmdir()
    (tmp_path / ".git").rmdir()
    assert await listed(project) == {"agent.py", "agl.yaml", "lib/a.py", ".env"}


async def test_a_project_of_which_git_tracks_nothing_is_copied_whole(tmp_path: Path) -> None:
    project = make_project(tmp_path / "repo" / "results", {"agent.py": LIST, "lib/a.py": ""})
    git(tmp_path / "repo", "init", "-q")
    assert await listed(project) == {"agent.py", "agl.yaml", "lib/a.py"}
    (tmp_path / "repo" / ".gitignore").write_text("results/\n")
    assert await listed(project) == {"agent.py", "agl.yaml", "lib/a.py"}


async def test_a_copy_leaves_out_the_policys_weights_and_what_is_no_file(tmp_path: Path) -> None:
    files = {"agent.py": LIST, "models/policy/model.safetensors": "", "models/notes": ""}
    os.mkfifo(tmp_path / "pipe")
    assert await listed(make_project(tmp_path, files, model={"path": "models/policy"})) == {
        *("agent.py", "agl.yaml", "models/notes")
    }
    assert "models/policy/model.safetensors" in await listed(make_project(tmp_path, files, model={"path": "."}))


async def test_a_copy_leaves_out_the_task_files_and_their_answers(tmp_path: Path) -> None:
    files = {"agent.py": LIST, "tasks/train.jsonl": "{}", "val.jsonl": "{}", "tasks/notes": ""}
    data = {"train": "tasks/train.jsonl", "val": "val.jsonl"}
    assert await listed(make_project(tmp_path, files, data=data)) == {"agent.py", "agl.yaml", "tasks/notes"}


def test_a_repository_that_git_refuses_is_no_folder_without_git(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: /nowhere\n")
    with pytest.raises(RunnerError, match=r"git rev-parse in .* failed: .*not a git repository"):
        Repository.find(tmp_path)


def repository(project: Project) -> None:
    (project.root / ".gitignore").write_text(".agl\n")
    git(project.root, "init", "-q")
    git(project.root, "add", ".")
    git(project.root, "commit", "-qm", "first")


@pytest.mark.parametrize("way", WAYS)
async def test_a_worktree_is_a_repository_of_its_own_for_the_agents_commits(tmp_path: Path, way: Way) -> None:
    commit = """
import subprocess
open("new", "w").write("x")
for words in (["checkout", "-qb", "fix"], ["add", "new"], ["commit", "-qm", "by the agent"]):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)
"""
    project = make_project(tmp_path, {"agent.py": commit}, agent={"workspace": "worktree"})
    repository(project)
    (tmp_path / "agent.py").write_text("raise SystemExit('not committed')")
    run = await run_agent(project, way)
    assert run.exit.ok, run.stderr.text
    assert git(tmp_path, "log", "--format=%s") == "first\n"
    assert git(tmp_path, "log", "--format=%s", "fix") == "by the agent\nfirst\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("way", SANDBOXES)
async def test_an_isolated_agent_plants_no_hook_in_the_repository(tmp_path: Path, way: Way) -> None:
    plant = (
        "import subprocess\nhooks = subprocess.check_output(['git', 'rev-parse', '--git-path', 'hooks'], text=True)\n"
    )
    plant += "open(hooks.strip() + '/post-checkout', 'w')\n"
    project = make_project(tmp_path / "project", {"agent.py": plant}, agent={"workspace": "worktree"})
    repository(project)
    run = await run_agent(project, way)
    assert "Read-only file system" in run.stderr.text
    assert (await run_agent(project)).exit.ok


async def test_a_worktree_of_a_folder_within_a_repository_starts_there(tmp_path: Path) -> None:
    code = "import os\nprint(os.getcwd())\n"
    project = make_project(tmp_path / "one", {"agent.py": code}, agent={"workspace": "worktree"})
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "one/agent.py")
    git(tmp_path, "commit", "-qm", "first")
    run = await run_agent(project, "none")
    assert run.stdout.text.strip() == str(project.state_dir / "rollouts/r1/0/workspace/one")


async def test_worktrees_of_attempts_that_are_gone_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_runtime.controller.runners.process.WORKSPACES_KEPT", 0)
    project = make_project(tmp_path, {"agent.py": ""}, agent={"workspace": "worktree"})
    repository(project)
    await run_agent(project)
    runner_of(project)
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1


async def test_a_worktree_needs_a_repository(tmp_path: Path) -> None:
    project = make_project(tmp_path, {"agent.py": ""}, agent={"workspace": "worktree"})
    with pytest.raises(RunnerError, match=r"is in no git repository\. Set agent\.workspace to copy or empty"):
        await run_agent(project)


async def test_an_attempts_folder_that_is_left_over_is_made_anew(tmp_path: Path) -> None:
    project = make_project(tmp_path, {"agent.py": LIST})
    stale = project.state_dir / "rollouts/r1/0/workspace/stale"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    assert await listed(project) == {"agent.py", "agl.yaml"}
