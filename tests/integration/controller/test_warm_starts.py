"""When agents that are to start warm start cold, and why; and what becomes of their helper."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import agl_runtime
from agl_runtime.config import Project
from agl_runtime.controller.runners import warm, warm_helper
from agl_runtime.controller.runners.base import AgentRun
from agl_runtime.controller.runners.process import ProcessRunner
from agl_runtime.errors import RunnerError
from fakes.agents import PYTHON, isolation, make_project, processes_with, runner_of, running, until
from fakes.claims import granted

PARENT = "import os\nprint(os.getppid())\n"


def project_of(tmp_path: Path, code: str = PARENT, files: dict[str, str] | None = None, **agent: Any) -> Project:
    return make_project(tmp_path / "p", {"agent.py": code, **(files or {})}, agent={"warm": True, **agent})


async def run(runner: ProcessRunner, name: str = "r1", task: Any = None) -> AgentRun:
    ended = await runner.run(granted(name, task), asyncio.Event())
    assert ended.exit.ok, ended.stderr.text
    return ended


def installed(tmp_path: Path, source: str, name: str = "heavy") -> dict[str, str]:
    """Settings that make a module importable as an installed one is."""
    (tmp_path / "lib").mkdir(exist_ok=True)
    (tmp_path / "lib" / f"{name}.py").write_text(source)
    return {"PYTHONPATH": str(tmp_path / "lib")}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('broken')", "importing heavy failed: RuntimeError: broken."),
        ("raise SystemExit(3)", "importing heavy failed: SystemExit: 3."),
        ("import threading\nthreading.Thread(target=input, daemon=True).start()", None),
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "2 threads run after the imports.",
        ),
        (
            "import sys\nsys.modules['grpc._cython.cygrpc'] = sys",
            "grpc._cython.cygrpc does not survive a fork.",
        ),
        (
            "import sys, types\nmine = types.ModuleType('torch')\n"
            "mine.cuda = types.SimpleNamespace(is_initialized=lambda: True)\nsys.modules['torch'] = mine",
            "torch has initialised CUDA.",
        ),
        ("import os\nos._exit(4)", "The helper of warm starts ended with exit code 4."),
    ],
)
async def test_imports_that_forbid_a_fork_mean_a_cold_start_with_the_reason(
    tmp_path: Path, source: str, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    project = project_of(tmp_path, warm=["heavy"], env=installed(tmp_path, source))
    runner = runner_of(project)
    try:
        assert (await run(runner)).stdout.text == f"{os.getpid()}\n" or reason is None
    finally:
        runner.close()
    if reason is not None:
        assert runner.starts == f"cold: {reason}"
        assert f"agents start cold: {reason}" in caplog.text


async def test_a_sandbox_that_hides_nothing_means_a_cold_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "sandbox_of", lambda view: {"mounts": [], "capabilities": []})
    runner = runner_of(project_of(tmp_path), "warm sandbox")
    try:
        assert (await run(runner)).stdout.text == "1\n"
        assert runner.starts == "cold: A forked agent cannot be isolated: a trial ended with 1."
    finally:
        runner.close()


async def test_a_module_that_is_not_installed_means_a_cold_start(tmp_path: Path) -> None:
    runner = runner_of(project_of(tmp_path, files={"mine.py": ""}, warm=["mine"]))
    error = await runner.try_warm()
    assert error is not None
    assert error.what.startswith("importing mine failed: ModuleNotFoundError")  # the agent's own code is not preloaded
    assert error.fix == "Correct agent.warm, or leave it out."
    await run(runner)


async def test_imports_that_do_not_end_mean_a_cold_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "IMPORT_S", 0.2)
    project = project_of(tmp_path, warm=["heavy"], env=installed(tmp_path, "import time\ntime.sleep(600)"))
    runner = runner_of(project)
    await run(runner)
    assert runner.starts == "cold: The helper of warm starts ended with signal 9 (timed out)."


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/bin/sh", "agent.py"], "agent.command starts `/bin/sh`, which is no Python interpreter."),
        ([PYTHON, "-c", "1"], "A fork cannot keep Python's option `-c`."),
        ([PYTHON, "-v", "agent.py"], "A fork cannot keep Python's option `-v`."),
        ([PYTHON, "-"], "A fork cannot keep Python's option `-`."),
        ([PYTHON, "{script}"], "agent.command names no script (.py) or module that is the same for all tasks."),
        ([PYTHON, "-m"], None),
        ([PYTHON, "folder"], "agent.command names no script (.py) or module that is the same for all tasks."),
        ([PYTHON], "agent.command names no script (.py) or module that is the same for all tasks."),
    ],
)
def test_another_command_than_python_with_a_script_starts_cold(
    tmp_path: Path, command: list[str], reason: str | None
) -> None:
    starts = runner_of(project_of(tmp_path, command=command)).starts
    assert starts == (f"cold: {reason}" if reason else "warm")


def test_the_options_of_python_are_told_from_its_script() -> None:
    assert warm.start_of_python(["/x/python3.12", "-uB", "-W", "error", "-Xdev", "a.py", "-c"]) == 5
    assert warm.start_of_python(["python", "-m", "pkg.tool", "{q}"]) == 1
    with pytest.raises(RunnerError, match=r"leave agent\.warm out"):
        warm.start_of_python(["uv", "run", "a.py"])


async def test_what_one_task_alone_asks_for_starts_that_one_cold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    project = project_of(tmp_path, env={"TZ": "{zone}"})
    runner = runner_of(project)
    try:
        assert (await run(runner, task={"zone": "Asia/Tokyo"})).stdout.text == f"{os.getpid()}\n"
        assert runner.starts == "warm, but for some: TZ differs by task, and is read when the interpreter starts"
        await run(runner, "r2", {"zone": "Asia/Tokyo"})
        assert caplog.text.count("an agent starts cold: TZ differs by task") == 1
    finally:
        runner.close()


async def test_a_file_beside_the_script_that_hides_an_imported_module_is_imported(tmp_path: Path) -> None:
    env = installed(tmp_path, "WHOSE = 'installed'")
    code = "import heavy\nprint(heavy.WHOSE)\n"
    for files, whose in (({}, "installed"), ({"heavy.py": "WHOSE = 'own'"}, "own"), ({"heavy/x": ""}, "installed")):
        place = tmp_path / f"{whose}{len(files)}"
        place.mkdir(exist_ok=True)
        runner = runner_of(project_of(place, code, files, warm=["heavy"], env=env))
        try:
            assert (await run(runner)).stdout.text == f"{whose}\n"
        finally:
            runner.close()
        assert runner.starts.startswith("warm, but for some: its heavy.py" if whose == "own" else "warm")


async def test_a_relative_search_path_starts_cold(tmp_path: Path) -> None:
    runner = runner_of(project_of(tmp_path, "import tool\n", {"lib/tool.py": ""}, env={"PYTHONPATH": "lib"}))
    try:
        await run(runner)
    finally:
        runner.close()
    assert runner.starts == "warm, but for some: PYTHONPATH is relative"


async def test_a_helper_that_dies_is_started_once_more_and_then_no_more(tmp_path: Path) -> None:
    runner = runner_of(project_of(tmp_path))
    try:
        helpers = []
        for name in ("r1", "r2"):
            helpers.append(int((await run(runner, name)).stdout.text))
            os.kill(helpers[-1], signal.SIGKILL)
            await until(lambda: psutil.Process(helpers[-1]).status() == psutil.STATUS_ZOMBIE)
        assert int((await run(runner, "r3")).stdout.text) == os.getpid()
        assert len({os.getpid(), *helpers}) == 3
        assert runner.starts == "cold: The helper of warm starts died again."
    finally:
        runner.close()


@pytest.mark.parametrize("sandbox", [False, True])
async def test_an_agent_whose_helper_dies_is_no_failed_agent(tmp_path: Path, *, sandbox: bool) -> None:
    mark = f"bereft-{os.getpid()}"
    code = f"import os, subprocess, sys, time\nopen('helper', 'w').write(str(os.getppid()))\nprint('{mark}')\n"
    code += f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{mark}'])\n"
    code += "open('ready', 'w').close()\ntime.sleep(0 if os.path.exists('never') else 600)\n"
    runner = runner_of(project_of(tmp_path, code), "warm sandbox" if sandbox else "warm")
    try:
        await runner.try_warm()
        work = asyncio.create_task(runner.run(granted(), asyncio.Event()))
        workspace = tmp_path / "p/.agl/rollouts/r1/0/workspace"
        await until((workspace / "ready").exists)
        helper = next(p for p in processes_with("warm_helper.py") if p.ppid() == os.getpid())
        helper.kill()
        if not sandbox:
            processes_with(mark)[0].parent().kill()
        with pytest.raises(RunnerError, match="helper of warm starts ended with signal 9"):
            await work
        assert processes_with(mark) == []
    finally:
        runner.close()


def test_the_end_of_an_agent_whose_helper_was_replaced_is_not_to_be_known(tmp_path: Path) -> None:
    helper = warm.Helper([PYTHON], [], {"AGL_TREE": f"{tmp_path}:warm"}, tmp_path)
    helper.import_modules()
    helper.close()
    with pytest.raises(RunnerError, match="helper of warm starts ended with signal 9"):
        helper.reap(1)


async def test_agents_are_ended_and_its_helper_goes_with_a_runner_that_is_closed(tmp_path: Path) -> None:
    async with running(project_of(tmp_path), "warm") as runner:
        helper = int((await run(runner)).stdout.text)
    assert not Path(f"/proc/{helper}").exists()


def test_another_system_starts_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert runner_of(project_of(tmp_path)).starts == "cold: A fork is unsafe on darwin."


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_privileges_starts_warm_in_a_sandbox_too(tmp_path: Path) -> None:
    """In a child process: an identity that was given up does not come back."""
    isolation("warm sandbox")
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("no Python that every user may run")
    code = f"""
import os, sys, tempfile
sys.path.insert(0, {str(Path(agl_runtime.__file__).parent.parent)!r})
sys.path += {[path for path in sys.path if "site-packages" in path]!r}
from functools import partial
from pathlib import Path
from agl_runtime.controller.runners import warm, warm_helper
from agl_runtime.controller.runners.isolation import prove
os.setgroups([]); os.setgid(65534); os.setuid(65534); os.chdir("/tmp")
with tempfile.TemporaryDirectory() as folder:
    helper = warm.Helper([{python!r}], [], {{"AGL_TREE": "x"}}, Path(folder))
    helper.import_modules()
    prove(partial(warm._trial, helper))
    checks = "test $(id -u) = 65534 && ! umount /proc && ! (: >> /proc/1/mem) && ! cat /proc/1/environ"
    def look(given, view, notes):
        code, said = warm._trial(helper, checks, view, notes)
        print(code)
        return code, said
    prove(look)
    helper.close()
"""
    done = subprocess.run([python, "-BI", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


async def test_a_runner_that_is_closed_while_modules_are_imported_leaves_no_helper(tmp_path: Path) -> None:
    env = installed(tmp_path, "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(600)")
    runner = runner_of(project_of(tmp_path, warm=["heavy"], env=env))
    work = asyncio.create_task(runner.run(granted(), asyncio.Event()))
    await until((tmp_path / "p/.agl/run/warm/begun").exists)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    runner.close()
    assert [p for p in processes_with("warm_helper.py") if p.ppid() == os.getpid()] == []
    await until(lambda: runner.starts.startswith("cold: The helper of warm starts ended with signal 9"))


async def test_an_agent_that_is_cancelled_while_modules_are_imported_spoils_none_of_the_next(tmp_path: Path) -> None:
    source = "import pathlib, time\npathlib.Path('begun').touch()\n"
    source += "while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
    runner = runner_of(project_of(tmp_path, warm=["heavy"], env=installed(tmp_path, source)))
    try:
        work = asyncio.create_task(runner.run(granted(), asyncio.Event()))
        await until((tmp_path / "p/.agl/run/warm/begun").exists)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        following = asyncio.create_task(run(runner, "r2"))
        (tmp_path / "p/.agl/run/warm/go").touch()
        assert int((await following).stdout.text) != os.getpid()
    finally:
        runner.close()


def test_the_helpers_file_does_nothing_when_it_is_only_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = [*sys.path]
    importlib.reload(warm_helper)
    assert sys.path == before
