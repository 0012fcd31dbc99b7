from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from agl_cli.runstate import ProcessId, Record, RunLock, end, left_record, read_record
from agl_runtime.errors import PreconditionError


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits to be ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_the_holder_is_on_record_while_it_holds(tmp_path: Path) -> None:
    with RunLock(tmp_path, "up") as lock:
        lock.record({"gateway": ProcessId.of(os.getpid())})
        record = read_record(tmp_path)
        assert record is not None
        assert (record.command, record.holder.pid, list(record.parts)) == ("up", os.getpid(), ["gateway"])
    assert read_record(tmp_path) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells ticks since the boot")
def test_a_run_is_still_known_when_the_wall_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(tmp_path, "up"):
        told = psutil.Process.create_time
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: told(process) + 3600)
        assert read_record(tmp_path) is not None


def unwritable(folder: Path) -> str:
    folder.chmod(0o500)
    return "Permission denied"


def full(folder: Path) -> str:
    (folder / ".agl" / "run").mkdir(parents=True)
    (folder / ".agl" / "run" / "up.new").symlink_to("/dev/full")
    return "No space left on device"


def a_file(folder: Path) -> str:
    (folder / ".agl").write_text("")
    return "File exists"


NOT_AS_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")


@pytest.mark.parametrize("spoil", [pytest.param(unwritable, marks=NOT_AS_ROOT), full, a_file])
def test_a_state_folder_that_cannot_be_written_is_named_with_the_remedy(
    tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    reason = spoil(tmp_path)
    message = rf"^{tmp_path}/\.agl cannot be written: {reason}\. Make it writable for you, with free disk space"
    with pytest.raises(PreconditionError, match=message), RunLock(tmp_path / ".agl", "up"):
        pass
    with pytest.raises(PreconditionError, match=message), RunLock(tmp_path / ".agl", "up"):  # and is not left locked
        pass


def test_a_second_command_is_refused_and_names_the_first(tmp_path: Path) -> None:
    message = rf"`agl up` \(process {os.getpid()}\) is using this project. Wait for it to end, or stop it with"
    with (
        RunLock(tmp_path, "up"),
        pytest.raises(PreconditionError, match=message),
        RunLock(tmp_path, "run", patience_s=0),
    ):
        pass


def test_the_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\nfrom agl_cli.runstate import RunLock\n"
        "with RunLock(pathlib.Path(sys.argv[1]), 'up'):\n    print('held', flush=True)\n    input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    holder.kill()
    holder.communicate()
    assert left_record(tmp_path) is not None
    assert read_record(tmp_path) is None
    with RunLock(tmp_path, "up", patience_s=0):
        assert read_record(tmp_path) is not None


def test_the_state_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    with RunLock(tmp_path / ".agl", "up"):
        assert [(tmp_path / name).stat().st_mode & 0o777 for name in (".agl", ".agl/run")] == [0o700, 0o700]


def test_another_process_with_the_same_pid_is_not_meant(other: subprocess.Popen[bytes]) -> None:
    known = ProcessId.of(other.pid)
    assert known.process() is not None
    assert ProcessId(known.pid, known.created - 100).process() is None


def test_ending_asks_the_holder_to_stop(other: subprocess.Popen[bytes]) -> None:
    record = Record("up", ProcessId.of(other.pid), 0.0)
    assert end(record)
    assert record.holder.process() is None
    assert end(record) is None


def test_ending_stops_parts_that_outlived_their_holder(other: subprocess.Popen[bytes]) -> None:
    known = ProcessId.of(other.pid)
    record = Record("up", ProcessId(known.pid, 0.0), 0.0, {"trainer": known})
    assert end(record)
    assert psutil.wait_procs([psutil.Process(other.pid)] if psutil.pid_exists(other.pid) else [], 10)[1] == []


def test_parts_that_outlived_their_holder_are_gone_before_new_ones_start(
    tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    left = {"command": "up", "holder": {"pid": 1, "created": 0.0}, "started_at": 0.0}
    left |= {"parts": {"trainer": asdict(ProcessId.of(other.pid))}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").write_text(json.dumps(left), encoding="utf-8")
    with RunLock(tmp_path, "up"):
        assert other.poll() is not None


@pytest.mark.parametrize("content", ["", "{}", json.dumps({"command": "up", "holder": 3, "parts": {}}), "[]"])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").write_text(content, encoding="utf-8")
    assert left_record(tmp_path) is None
