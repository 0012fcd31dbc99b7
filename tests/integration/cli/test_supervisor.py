"""The supervisor over small programs that stand in for the parts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from agl_cli import supervisor as supervisor_module
from agl_cli.runstate import ProcessId
from agl_cli.supervisor import PartCommand, PartEnd, Supervisor

WAITS = """
import pathlib, signal, sys, threading
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
pathlib.Path(sys.argv[1]).write_text("up")
stop.wait()
with open(sys.argv[2], "a") as order:
    order.write(sys.argv[3] + "\\n")
"""
DEAF = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""
COUNTS = """
import pathlib, sys
runs = pathlib.Path(sys.argv[1])
with runs.open("a") as lines:
    lines.write(" ".join(sys.argv[3:]) + "\\n")
n = len(runs.read_text().splitlines())
codes = [int(code) for code in sys.argv[2].split(",")]
print("2026-01-01 00:00:00,000 ERROR   part: it broke", n, file=sys.stderr)
sys.exit(codes[min(n, len(codes)) - 1])
"""


class Watched:
    """A supervisor with what it said and recorded."""

    def __init__(self, state_dir: Path, *commands: PartCommand) -> None:
        self.notes: list[str] = []
        self.records: list[Mapping[str, ProcessId]] = []
        self.supervisor = Supervisor(state_dir, commands, notify=self.notes.append, record=self.records.append)


def program(name: str, source: str, *arguments: object, once: bool = False) -> PartCommand:
    return PartCommand(name, (sys.executable, "-c", source, *map(str, arguments)), once)


async def appearance(file: Path) -> str:
    async with asyncio.timeout(20):
        while not file.exists() or not file.read_text():
            await asyncio.sleep(0.02)
    return file.read_text()


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / ".agl"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_S", 0.01)


async def test_parts_are_stopped_controller_first_and_gateway_last(tmp_path: Path, state_dir: Path) -> None:
    order = tmp_path / "order"
    names = ("gateway", "controller", "trainer")
    watched = Watched(state_dir, *(program(name, WAITS, tmp_path / name, order, name) for name in names))
    await watched.supervisor.start()
    for name in names:
        await appearance(tmp_path / name)
    await watched.supervisor.stop()
    assert order.read_text().split() == ["controller", "trainer", "gateway"]
    assert set(watched.records[-1]) == set(names)


@pytest.mark.usefixtures("quick")
async def test_a_part_that_dies_is_started_again_and_its_last_error_shown(tmp_path: Path, state_dir: Path) -> None:
    watched = Watched(state_dir, program("trainer", COUNTS, tmp_path / "runs", "1,1,0", once=True))
    await watched.supervisor.start()
    assert await watched.supervisor.ended() == PartEnd("trainer", 0)
    assert watched.notes == [
        "trainer died (exit code 1: it broke 1); starting it again",
        "trainer died (exit code 1: it broke 2); starting it again",
    ]


@pytest.mark.parametrize("code", [2, 3])
async def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path, state_dir: Path, code: int) -> None:
    watched = Watched(state_dir, program("controller", COUNTS, tmp_path / "runs", code))
    await watched.supervisor.start()
    assert await watched.supervisor.ended() == PartEnd("controller", code, "it broke 1")
    await watched.supervisor.stop()
    assert watched.notes == []


@pytest.mark.usefixtures("quick")
async def test_a_part_that_keeps_dying_is_given_up(tmp_path: Path, state_dir: Path) -> None:
    watched = Watched(state_dir, program("gateway", COUNTS, tmp_path / "runs", 1))
    await watched.supervisor.start()
    assert await watched.supervisor.ended() == PartEnd("gateway", 1, "it broke 4")


@pytest.mark.usefixtures("quick")
async def test_a_part_that_dies_of_the_same_error_twice_is_given_up(state_dir: Path) -> None:
    watched = Watched(state_dir, program("trainer", "raise SystemExit('no model')"))
    await watched.supervisor.start()
    assert await watched.supervisor.ended() == PartEnd("trainer", 1, "no model")
    assert watched.notes == ["trainer died (exit code 1: no model); starting it again"]


async def test_a_part_that_ignores_the_stop_is_killed_with_what_it_started(tmp_path: Path, state_dir: Path) -> None:
    watched = Watched(state_dir, program("trainer", DEAF, tmp_path / "pid"))
    await watched.supervisor.start()
    grandchild = psutil.Process(int(await appearance(tmp_path / "pid")))
    await watched.supervisor.stop(grace_s=0.1)
    assert psutil.wait_procs([grandchild], timeout=20)[1] == []
    assert watched.notes == ["trainer did not stop within 0 s and is killed"]


async def test_without_a_gateway_the_other_parts_have_little_time_to_stop(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_WITHOUT_GATEWAY_S", 0.1)
    gateway = program("gateway", COUNTS, tmp_path / "runs", 2)
    watched = Watched(state_dir, program("trainer", DEAF, tmp_path / "pid"), gateway)
    await watched.supervisor.start()
    await appearance(tmp_path / "pid")
    await watched.supervisor.ended()
    await watched.supervisor.stop()
    assert watched.notes == ["trainer did not stop within 0 s and is killed"]


async def test_a_program_that_cannot_be_started_ends_the_run(state_dir: Path) -> None:
    watched = Watched(state_dir, PartCommand("gateway", ("/nowhere/python",)))
    await watched.supervisor.start()
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        await watched.supervisor.ended()
    await watched.supervisor.stop()


PARENT = """
import asyncio, pathlib, sys
from agl_cli.supervisor import PartCommand, Supervisor

async def main():
    part = PartCommand("gateway", (sys.executable, "-c", sys.argv[2], sys.argv[3]))
    supervisor = Supervisor(pathlib.Path(sys.argv[1]), [part], notify=print, record=lambda _: None)
    await supervisor.start()
    await supervisor.ended()

asyncio.run(main())
"""
ORPHAN = """
import os, pathlib, signal, sys, threading
from agl_runtime import part
part.PARENT_GRACE_S = 0.1
part.stop_with_parent()
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
threading.Event().wait()
"""


@pytest.mark.parametrize("deaf", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
async def test_parts_end_when_their_supervisor_is_killed(tmp_path: Path, state_dir: Path, deaf: str) -> None:
    source = ORPHAN.replace("part.stop_with_parent()", f"part.stop_with_parent(); {deaf}")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(state_dir), source, str(tmp_path / "pid")])
    part = psutil.Process(int(await appearance(tmp_path / "pid")))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs([part], timeout=20)[1] == []
