"""What an isolated agent cannot do, each shown by an agent that can without isolation."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agl_runtime
from agl_runtime.config import Project
from agl_runtime.controller.runners import isolation as isolation_module
from agl_runtime.controller.runners.isolation import Kind, choose_isolation, exit_code, probe_isolation
from agl_runtime.errors import PreconditionError
from fakes.agents import SANDBOXES, Way, isolation, make_project, run_agent

ISOLATED: tuple[Kind, ...] = ("unshare", "bubblewrap")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root could do it without isolation")

# Tries each expression of its task and tells which of them raised nothing.
TRY = """
import json, multiprocessing.shared_memory, os, pathlib, signal, subprocess, sys

def read(path): return pathlib.Path(path).read_bytes()

def write(path):
    with open(path, "a") as file: file.write("x")

OWN = ("unshare", "--user", "--map-root-user", "--mount")

def run(*words): subprocess.run(words, check=True, stderr=subprocess.DEVNULL)

done = {}
for name, expression in json.load(open(sys.argv[1])).items():
    try:
        eval(expression)
    except (OSError, subprocess.CalledProcessError) as error:
        done[name] = str(error)
    else:
        done[name] = "done"
print(json.dumps(done))
"""

# Reaches for all that the sandbox's first process has open, but the standard streams of both.
FIRST_PROCESS = """
import os, signal, sys

def each_other_end(do):
    for name in os.listdir("/proc/1/fd"):
        if name not in "12":
            try:
                do(f"/proc/1/fd/{name}")
            except OSError:
                continue
"""


async def tried(tmp_path: Path, way: Way, expressions: dict[str, str], **agent: Any) -> dict[str, str]:
    command = [sys.executable, "agent.py", "{task_file}"]
    run = await run_agent(made(tmp_path, command=command, **agent), way, expressions)
    assert run.exit.ok, run.stderr.text
    return dict(json.loads(run.stdout.text))


def made(tmp_path: Path, **agent: Any) -> Project:
    project = make_project(tmp_path / "project", {"agent.py": TRY, "reward.py": ""}, agent=agent)
    for name in ("key", "store.sqlite3", "rollouts/other/0/workspace/file"):
        (project.state_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (project.state_dir / name).write_text("secret")
    return project


def forbidden(tmp_path: Path) -> dict[str, str]:
    state = tmp_path / "project" / ".agl"
    return {
        "key": f"read('{state}/key')",
        "store": f"read('{state}/store.sqlite3')",
        "another workspace": f"read('{state}/rollouts/other/0/workspace/file')",
        "the key by the way up": "read('../../../../key')",
        "a signal to the controller": f"os.kill({os.getpid()}, 0)",
        "a signal to another agent": f"os.kill({os.getppid()}, 0)",
        "the controller's environment": f"read('/proc/{os.getpid()}/environ')",
        "the controller's view of the disk": f"os.listdir('/proc/{os.getpid()}/root')",
        "the reward function": f"write('{tmp_path}/project/reward.py')",
        "its own printed output": f"open('{state}/rollouts/r1/0/stdout', 'r+')",
    }


def writable_control_groups() -> list[Path]:
    """Through them processes can be frozen and killed."""
    return [path for path in Path("/sys/fs/cgroup").glob("*/cgroup.procs") if os.access(path, os.W_OK)]


@pytest.mark.parametrize("way", SANDBOXES)
async def test_an_isolated_agent_reads_and_signals_nothing_of_agl_or_of_others(tmp_path: Path, way: Way) -> None:
    expressions = forbidden(tmp_path)
    isolation(way)
    for number, group in enumerate(writable_control_groups()):
        expressions[f"control group {number}"] = f"open('{group}', 'r+')"
    assert set((await tried(tmp_path, "none", expressions)).values()) == {"done"}
    refused = await tried(tmp_path, way, expressions)
    assert not [name for name, result in refused.items() if result == "done"]
    assert (tmp_path / "project" / "reward.py").read_text() == ""


@pytest.mark.parametrize("way", SANDBOXES)
async def test_an_isolated_agent_cannot_undo_its_isolation(tmp_path: Path, way: Way) -> None:
    state = tmp_path / "project" / ".agl"
    undo = {
        "unmount": f"run('umount', '{state}')",
        "unmount lazily": f"run('umount', '-l', '{state}')",
        "make writable": f"run('mount', '-o', 'remount,bind,rw', '{tmp_path}/project')",
        "unmount in a namespace of its own": f"run(*OWN, 'umount', '{state}')",
        "bind around in a namespace of its own": f"run(*OWN, 'sh', '-c', 'mount --bind / /mnt && cat /mnt{state}/key')",
        "the first process's mounts": "run('nsenter', '--target', '1', '--mount', 'true')",
    }
    if way != "bubblewrap":  # there the first process has more rights than the agent
        undo["the first process's memory"] = "open('/proc/1/mem', 'r+b')"
    results = await tried(tmp_path, way, undo)
    assert not [name for name, result in results.items() if result == "done"]


@needs_root
@pytest.mark.parametrize("way", SANDBOXES)
async def test_an_agent_of_root_has_no_way_around_through_the_kernel(tmp_path: Path, way: Way) -> None:
    ways = {
        "a device of its own": "os.mknod('disk', 0o60600, os.makedev(7, 0))",
        "kernel settings": "open('/proc/sys/kernel/core_pattern', 'r+')",
        "hot-plug settings": "open('/sys/kernel/mm/transparent_hugepage/enabled', 'r+')",
    }
    disks = [name for name in os.listdir("/dev") if Path("/dev", name).is_block_device()]
    ways |= {f"the disk {name}": f"os.stat('/dev/{name}') and open('/dev/{name}', 'rb')" for name in disks[:2]}
    results = await tried(tmp_path, way, ways)
    assert not [name for name, result in results.items() if result == "done"]
    assert (await tried(tmp_path, "none", ways))["kernel settings"] == "done"


@pytest.mark.parametrize("way", SANDBOXES)
async def test_an_isolated_agent_can_still_work(tmp_path: Path, way: Way) -> None:
    allowed = {
        "its workspace": "write('file')",
        "its home": "write(os.path.expanduser('~/file'))",
        "its temporary files": "write(os.environ['TMPDIR'] + '/file')",
        "the project's files, to read": f"read('{tmp_path}/project/agl.yaml')",
        "the rest of the disk": f"write('{tmp_path}/elsewhere')",
        "devices": "read('/dev/null') == b'' and write('/dev/null') or open('/dev/urandom', 'rb').read(1)",
        "a terminal": "os.openpty()",
        "shared memory": "multiprocessing.shared_memory.SharedMemory(create=True, size=8).unlink()",
        "its own processes": "os.kill(subprocess.Popen(['sleep', '60']).pid, signal.SIGKILL)",
        "owners": "os.chown('file', 1, 1)" if os.geteuid() == 0 else "os.chown('file', -1, -1)",
    }
    results = await tried(tmp_path, way, allowed)
    assert {name: result for name, result in results.items() if result != "done"} == {}


@pytest.mark.parametrize("way", SANDBOXES)
async def test_a_state_folder_that_is_a_link_is_hidden_where_it_really_is(tmp_path: Path, way: Way) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / ".agl").symlink_to(tmp_path / "disk")
    results = await tried(
        tmp_path, way, {"link": f"read('{tmp_path}/project/.agl/key')", "real": f"read('{tmp_path}/disk/key')"}
    )
    assert "done" not in results.values()


@needs_root
@pytest.mark.parametrize("kind", ISOLATED)
def test_a_user_without_privileges_is_isolated_too(kind: Kind) -> None:
    """In a child process: an identity that was given up does not come back."""
    isolation(kind)
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("no Python that every user may run")
    code = f"""
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534); os.chdir("/tmp")
sys.path.insert(0, {str(Path(agl_runtime.__file__).parent.parent)!r})
from agl_runtime.controller.runners.isolation import probe_isolation
print(probe_isolation(("{kind}",)))
"""
    done = subprocess.run([python, "-BI", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{kind}\n"


def test_without_any_tool_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation_module, "TOOL_PATH", "/nowhere")
    found = probe_isolation()
    assert str(found) == "none: bubblewrap: bwrap is not installed; unshare: unshare is not installed"
    assert choose_isolation("auto") == found
    with pytest.raises(PreconditionError, match=r"cannot be isolated here: bubblewrap: .*Install bubblewrap, or set"):
        choose_isolation("required")


def test_a_tool_that_hides_nothing_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bwrap").write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift; exec "$@"\n')
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(isolation_module, "TOOL_PATH", str(tmp_path))
    assert probe_isolation(("bubblewrap",)).kind == "none"


def test_isolation_can_be_turned_off_and_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(choose_isolation("off")) == "none: agent.isolation is off"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert str(probe_isolation()) == "none: namespaces need Linux, and this is darwin"


@pytest.mark.parametrize("way", SANDBOXES)
async def test_the_task_files_show_an_isolated_agent_nothing(tmp_path: Path, way: Way) -> None:
    files = {"agent.py": TRY, "train.jsonl": "answer", "my tasks/val.jsonl": "answer"}
    data = {"train": "train.jsonl", "val": "my tasks/val.jsonl"}
    command = [sys.executable, "agent.py", "{task_file}"]
    project = make_project(tmp_path / "project", files, data=data, agent={"command": command})
    seen = {name: f"b'answer' in read('{project.root}/{name}') or run('false')" for name in data.values()}
    for each in ("none", way):
        run = await run_agent(project, each, seen)
        assert run.exit.ok, run.stderr.text
        assert [result == "done" for result in json.loads(run.stdout.text).values()] == [each == "none"] * 2


@pytest.mark.parametrize("way", SANDBOXES)
@pytest.mark.parametrize(
    "deed",
    [
        "os.kill(os.getppid(), signal.SIGINT)",
        "[os.kill(os.getppid(), number) for number in signal.valid_signals()]",
        "each_other_end(lambda path: open(path, 'wb', 0).write(b'junk 7'))",
        "each_other_end(lambda path: os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 4096))",
    ],
)
async def test_no_deed_of_an_agent_reads_as_a_failure_of_the_sandbox(tmp_path: Path, way: Way, deed: str) -> None:
    code = f"{FIRST_PROCESS}\ntry: {deed}\nexcept OSError: pass\nsys.exit(5)\n"
    run = await run_agent(make_project(tmp_path, {"agent.py": code}), way)
    assert (run.exit.exit_code, run.exit.signal) in {(5, None), (None, signal.SIGKILL)}


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (b"begun\n\n0\n", 0),
        (b"begun\n\n143\n", -15),
        (b"begun\n\n255\n", 255),
        (b"begun\njunk 7\n3\n", 3),
        (b"begun\n1\n99999\n\xff\n", 1),
        (b"begun\n", -9),
        (b"begun\njunk", -9),
        (b"", None),
        (b"0\n", None),
    ],
)
def test_a_report_is_the_last_code_after_the_beginning(report: bytes, code: int | None) -> None:
    assert exit_code(report) == code


async def test_the_probe_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    await asyncio.to_thread(probe_isolation)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("agl-probe")] == []
