"""Real agents, run by the process runner with and without isolation."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from agl_runtime.controller.runners import process, tree, workspace
from agl_runtime.controller.runners.isolation import MASK
from agl_runtime.controller.runners.process import ProcessRunner
from agl_runtime.errors import ConfigError, RunnerError
from fakes.agents import (
    PYTHON,
    SANDBOXES,
    WAYS,
    Way,
    isolation,
    make_project,
    processes_with,
    run_agent,
    runner_of,
    running,
    until,
)
from fakes.claims import granted

TELL = """
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "stdin": sys.stdin.read()}))
"""
# What a stubborn agent leaves behind: a child, one in a session of its own, and a daemon that was forked twice.
SCATTER = """
import os, subprocess, sys, time
mark = sys.argv[1]
sleep = [sys.executable, "-c", "import time; time.sleep(600)", mark]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sleep[0], sleep)
    os._exit(0)
os.wait()
open("ready", "w").close()
"""


@pytest.mark.parametrize("way", WAYS)
async def test_an_agent_finds_its_task_its_model_and_a_place_of_its_own(tmp_path: Path, way: Way) -> None:
    command = [PYTHON, "agent.py", "--q", "{q}", "{task_file}"]
    project = make_project(tmp_path / "my project", {"agent.py": TELL}, agent={"command": command})
    task = {"q": "-say \"é\"\nand 'so' on {braces} $HOME `x`"}
    run = await run_agent(project, way, task)
    assert run.exit.ok, run.stderr.text
    told = json.loads(run.stdout.text)
    attempt = project.state_dir / "rollouts" / "r1" / "0"
    assert told["argv"][:2] == ["--q", task["q"]]
    assert told["cwd"] == str(attempt / "workspace") == str(run.workspace)
    assert told["env"]["HOME"] == str(attempt / "home")
    assert told["env"]["TMPDIR"] == str(attempt / "tmp")
    assert told["env"]["OPENAI_API_KEY"] == "agent-key"
    assert told["stdin"] == ""
    assert json.loads(Path(told["argv"][2]).read_text()) == task


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("ending", "code", "number"),
    [("sys.exit(7)", 7, None), ("os.kill(os.getpid(), signal.SIGTERM)", None, signal.SIGTERM)],
)
async def test_an_exit_code_and_a_signal_are_told_apart(
    tmp_path: Path, way: Way, ending: str, code: int | None, number: int | None
) -> None:
    project = make_project(tmp_path, {"agent.py": f"import os, signal, sys\n{ending}\n"})
    run = await run_agent(project, way)
    assert (run.exit.exit_code, run.exit.signal, run.exit.timed_out) == (code, number, False)


@pytest.mark.parametrize("way", WAYS)
async def test_what_an_agent_used_is_measured(tmp_path: Path, way: Way) -> None:
    busy = "import time\nblock = bytearray(150 * 2**20)\nwhile time.process_time() < 0.3: pass\n"
    run = await run_agent(make_project(tmp_path, {"agent.py": busy}), way)
    assert 0.3 <= run.exit.cpu_s < 30
    assert run.exit.max_rss_mb >= 150
    assert run.exit.duration_s > 0


async def test_output_beyond_the_limit_is_counted_and_costs_no_memory(tmp_path: Path) -> None:
    shout = "import os\nfor _ in range(256): os.write(1, b'x' * 2**20)\nos.write(2, b'done')\n"
    project = make_project(tmp_path, {"agent.py": shout}, agent={"output_limit_kb": 64})
    before = psutil.Process().memory_info().rss
    run = await run_agent(project)
    assert run.exit.ok
    assert run.stdout.size_bytes == 256 * 2**20
    assert run.stdout.text == "x" * 64 * 1024
    assert run.stderr.text == "done"
    assert (run.workspace.parent / "stdout").stat().st_size == 64 * 1024
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


@pytest.mark.parametrize("way", WAYS)
async def test_an_agent_that_fills_its_disk_space_is_ended_and_says_why(tmp_path: Path, way: Way) -> None:
    fill = "import os, time\nfor n in range(3):\n    open(f'{os.environ[\"HOME\"]}/{n}', 'wb').write(b'x' * 2**20)\n"
    project = make_project(tmp_path, {"agent.py": f"{fill}time.sleep(600)\n"}, agent={"disk_mb": 2})
    run = await run_agent(project, way)
    assert (run.exit.ok, run.exit.over_disk, run.exit.timed_out) == (False, True, False)


async def test_an_agent_that_took_too_much_disk_space_and_ended_is_told_from_one_within_it(tmp_path: Path) -> None:
    write = "open('big', 'wb').write(b'x' * 2**20)\nopen('sparse', 'wb').truncate(2**30)\n"
    for limit_mb, exceeded in ((1, True), (2, False)):
        run = await run_agent(make_project(tmp_path, {"agent.py": write}, agent={"disk_mb": limit_mb}))
        assert (run.exit.exit_code, run.exit.over_disk, run.exit.ok) == (0, exceeded, not exceeded)


async def test_a_workspace_that_does_not_fit_on_the_disk_is_no_failure_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path, **_: bool) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    project = make_project(tmp_path, {"agent.py": "print('fine')"})
    with monkeypatch.context() as patch:
        patch.setattr(workspace.shutil, "copy2", full)
        with pytest.raises(RunnerError, match=r"The folder .*/r1/0 cannot be made: .*No space left.* Check the disk\."):
            await run_agent(project)
    assert (await run_agent(project)).stdout.text == "fine\n", "once there is space again, the same attempt runs"


async def test_output_that_is_no_text_is_kept_readable(tmp_path: Path) -> None:
    run = await run_agent(make_project(tmp_path, {"agent.py": "import os\nos.write(1, bytes([255, 65]))\n"}))
    assert run.stdout.text == "\ufffdA"
    assert run.stdout.size_bytes == 2


@pytest.mark.parametrize("way", WAYS)
async def test_what_an_agent_left_running_ends_with_it(tmp_path: Path, way: Way) -> None:
    mark = f"left-{way.replace(' ', '-')}-{os.getpid()}"
    project = make_project(tmp_path, {"agent.py": SCATTER}, agent={"command": [PYTHON, "agent.py", mark]})
    run = await run_agent(project, way)
    assert run.exit.ok, run.stderr.text
    assert processes_with(mark) == []


@pytest.mark.parametrize("way", WAYS)
async def test_past_its_time_the_whole_tree_is_killed(tmp_path: Path, way: Way) -> None:
    mark = f"late-{way.replace(' ', '-')}-{os.getpid()}"
    stay = SCATTER + "signal = __import__('signal'); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)\n"
    project = make_project(tmp_path, {"agent.py": stay}, agent={"command": [PYTHON, "agent.py", mark]})
    expired = asyncio.Event()
    async with running(project, way) as runner:
        run_of_agent = asyncio.create_task(runner.run(granted(), expired))
        await until((project.state_dir / "rollouts/r1/0/workspace/ready").exists)
        assert len(processes_with(mark)) >= 3  # a forked agent's own command line is that of its helper
        expired.set()
        run = await run_of_agent
    assert (run.exit.exit_code, run.exit.signal, run.exit.timed_out) == (None, signal.SIGKILL, True)
    assert run.exit.cpu_s > 0
    assert processes_with(mark) == []


@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_run_leaves_no_process(tmp_path: Path, way: Way) -> None:
    mark = f"cancelled-{way.replace(' ', '-')}-{os.getpid()}"
    project = make_project(
        tmp_path, {"agent.py": SCATTER + "time.sleep(600)\n"}, agent={"command": [PYTHON, "agent.py", mark]}
    )
    async with running(project, way) as runner:
        run_of_agent = asyncio.create_task(runner.run(granted(), asyncio.Event()))
        await until((project.state_dir / "rollouts/r1/0/workspace/ready").exists)
        run_of_agent.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run_of_agent
    assert processes_with(mark) == []


async def test_what_an_earlier_controller_left_is_ended_before_this_one_begins(tmp_path: Path) -> None:
    mark = f"orphan-{os.getpid()}"
    project = make_project(tmp_path)
    env = {**os.environ, "AGL_TREE": f"{project.state_dir}:r9/0"}
    sleep = [PYTHON, "-c", "import time; time.sleep(600)", mark]
    orphan = await asyncio.create_subprocess_exec(*sleep, env=env, start_new_session=True)
    other = await asyncio.create_subprocess_exec(*sleep, env={**env, "AGL_TREE": "/elsewhere:r9/0"})
    try:
        runner_of(project)
        assert await orphan.wait() == -signal.SIGKILL
        assert other.returncode is None
    finally:
        other.kill()
        await other.wait()


async def test_an_end_is_noticed_without_the_kernels_handle_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tree.os, "pidfd_open")
    run = await run_agent(make_project(tmp_path, {"agent.py": "raise SystemExit(5)\n"}))
    assert run.exit.exit_code == 5


async def test_a_long_text_reaches_the_agent_through_the_task_file(tmp_path: Path) -> None:
    command = [PYTHON, "agent.py", "{task_file}"]
    code = "import json, sys\nprint(len(json.load(open(sys.argv[1]))['q']))\n"
    run = await run_agent(
        make_project(tmp_path, {"agent.py": code}, agent={"command": command}), task={"q": "é" * 200_000}
    )
    assert run.stdout.text == "200000\n"

    direct = make_project(tmp_path / "direct", agent={"command": [PYTHON, "agent.py", "{q}"]})
    with pytest.raises(ConfigError, match=r"is 200000 bytes long.*Give the agent \{task_file\}"):
        await run_agent(direct, task={"q": "x" * 200_000})


async def test_arguments_too_long_together_are_refused_with_the_remedy(tmp_path: Path) -> None:
    project = make_project(tmp_path, agent={"command": [PYTHON, *["{q}"] * 40]})
    with pytest.raises(RunnerError, match=r"cannot be started.*\{task_file\}"):
        await run_agent(project, task={"q": "x" * 130_000})


async def test_a_program_is_found_by_path_in_the_workspace_or_in_the_project(tmp_path: Path) -> None:
    script = "#!/bin/sh\npwd; echo $0\n"
    project = make_project(tmp_path, {"run.sh": script, ".venv/pyvenv.cfg": "", ".venv/bin/run": script})
    for name in ("run.sh", ".venv/bin/run"):
        (tmp_path / name).chmod(0o755)
    workspace = project.state_dir / "rollouts/r1/0/workspace"
    for command, place in ((["./run.sh"], workspace / "run.sh"), ([".venv/bin/run"], tmp_path / ".venv/bin/run")):
        run = await run_agent(make_project(tmp_path, agent={"command": command}))
        assert [os.path.normpath(line) for line in run.stdout.text.split()] == [str(workspace), str(place)]


def test_a_program_that_is_not_on_the_path_is_refused_before_anything_runs(tmp_path: Path) -> None:
    project = make_project(tmp_path, agent={"command": "no-such-program"})
    with pytest.raises(ConfigError) as caught:
        ProcessRunner(project, "http://gateway", isolation("none"))
    assert caught.value.what.startswith("agent.command: no program `no-such-program` is on your PATH (agl's own")
    assert caught.value.fix == "Install it, or give its absolute path."


async def test_a_missing_program_in_the_workspace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no program `\./run\.sh` is there"):
        await run_agent(make_project(tmp_path, agent={"command": "./run.sh"}))


@pytest.mark.parametrize("way", WAYS)
async def test_files_of_the_users_home_are_shown_and_stay_as_they_are(tmp_path: Path, way: Way) -> None:
    home = tmp_path / "real"
    (home / ".tool").mkdir(parents=True)
    (home / ".tool" / "settings").write_text("mine")
    (home / ".rc").write_text("rc")
    code = """
import pathlib
home = pathlib.Path.home()
print((home / ".tool/settings").read_text(), (home / ".rc").read_text(), sorted(p.name for p in home.iterdir()))
try:
    (home / ".rc").write_text("changed")
except OSError:
    pass
"""
    project = make_project(tmp_path / "p", {"agent.py": code}, agent={"home_files": [".tool", ".rc"]})
    run = await run_agent(project, way, environ={**os.environ, "HOME": str(home)})
    assert run.stdout.text == "mine rc ['.rc', '.tool']\n", run.stderr.text
    assert (home / ".rc").read_text() == "rc"


def test_home_files_that_are_not_there_or_not_of_the_home_are_refused(tmp_path: Path) -> None:
    for name in ("absent", "../other", "/etc/passwd"):
        project = make_project(tmp_path, agent={"home_files": [name]})
        with pytest.raises(ConfigError, match=r"agent\.home_files: .* is no file or folder of"):
            ProcessRunner(project, "http://gateway", isolation("none"))


@pytest.mark.parametrize("way", SANDBOXES)
async def test_a_sandbox_that_fails_is_no_failure_of_the_agent(tmp_path: Path, way: Way) -> None:
    project = make_project(tmp_path, {"agent.py": ""}, agent={"home_files": ["x"]})
    (tmp_path / "home" / "x").touch()
    async with running(project, way) as runner:
        (tmp_path / "home" / "x").unlink()
        (project.state_dir / MASK).rmdir()
        with pytest.raises(RunnerError):
            await runner.run(granted(), asyncio.Event())


async def test_an_id_of_dots_stays_within_the_rollouts(tmp_path: Path) -> None:
    project = make_project(tmp_path, {"agent.py": ""})
    run = await runner_of(project).run(granted(".."), asyncio.Event())
    assert run.workspace.parent.parent.parent == project.state_dir / "rollouts"


async def test_old_workspaces_go_and_what_agents_printed_stays_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "WORKSPACES_KEPT", 1)
    monkeypatch.setattr(process, "OUTPUTS_KEPT", 1)
    lock = "import os, pathlib\npathlib.Path('deep/er').mkdir(parents=True)\nos.chmod('deep', 0o500)\nprint('hi')\n"
    project = make_project(tmp_path, {"agent.py": lock})
    runner = runner_of(project)
    for name in ("r1", "r2", "r3"):
        await runner.run(granted(name), asyncio.Event())
        await runner.release(granted(name))
    rollouts = project.state_dir / "rollouts"
    assert not (rollouts / "r1" / "0").exists()
    assert (rollouts / "r2" / "0" / "stdout").read_text() == "hi\n"
    assert not (rollouts / "r2" / "0" / "workspace").exists()
    assert (rollouts / "r3" / "0" / "workspace" / "deep").exists()

    runner_of(project)
    assert (rollouts / "r3" / "0" / "workspace" / "deep").exists()


def test_native_windows_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_project(tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RunnerError, match="Run agl inside WSL"):
        ProcessRunner(project, "http://gateway", isolation("none"))


async def test_an_agent_that_does_not_ask_for_the_task_file_finds_none(tmp_path: Path) -> None:
    code = "import os\nprint(os.listdir(os.environ['TMPDIR']))\n"
    for env, there in (({}, []), ({"A": "{{task_file}}"}, []), ({"A": "{task_file}"}, ["task.json"])):
        run = await run_agent(make_project(tmp_path, {"agent.py": code}, agent={"env": env}))
        assert run.stdout.text == f"{there}\n"


async def test_folders_nested_deeper_than_a_path_is_long_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "WORKSPACES_KEPT", 0)
    code = "import os\nfor _ in range(3000):\n    os.mkdir('deep')\n    os.chdir('deep')\n"
    project = make_project(tmp_path, {"agent.py": code})
    runner = runner_of(project)
    run = await runner.run(granted(), asyncio.Event())
    assert run.exit.ok, run.stderr.text
    await runner.release(granted())
    assert not run.workspace.exists()


async def test_what_cannot_be_removed_stays_and_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "WORKSPACES_KEPT", 0)
    project = make_project(tmp_path)
    for name in ("r1", "r2"):
        (project.state_dir / "rollouts" / name / "0" / "workspace").mkdir(parents=True)
    remove = workspace.remove

    def refuse(path: Path) -> None:
        if "r1" in path.parts:
            raise OSError("held")
        remove(path)

    monkeypatch.setattr(workspace, "remove", refuse)
    runner_of(project)
    left = [path.parts[-3] for path in (project.state_dir / "rollouts").glob("*/0/workspace")]
    assert left == ["r1"]
    assert "an old attempt is not removed: held" in caplog.text
