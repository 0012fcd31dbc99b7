"""What is refused as a store, and with which sentence."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from agl_runtime.errors import StoreError
from agl_runtime.schemas import RolloutCreate
from agl_runtime.store import database
from agl_runtime.store.sqlite import open_store
from fakes.recorded import record

HOLD = """
import sys
from pathlib import Path
from agl_runtime.store import database
lock = database.lock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite3"


def test_a_commit_survives_kill_9_and_does_not_wait_for_the_disk(path: Path) -> None:
    db = database.open_writer(path)
    settings = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "foreign_keys")]
    db.close()
    assert settings == ["wal", 1, 1], "1 is NORMAL"


def test_a_file_that_is_no_database_is_left_as_it_is(path: Path) -> None:
    path.write_bytes(b"tasks, not a database\n" * 100)
    with pytest.raises(StoreError) as caught:
        open_store(path)
    assert str(caught.value) == (
        f"{path} is not a store of agl (file is not a database). Move the file away, or use another project folder."
    )
    assert path.read_bytes() == b"tasks, not a database\n" * 100


def test_another_programs_database_is_left_as_it_is(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE notes (text)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"is a database of another program\. Move the file away"):
        open_store(path)
    assert path.read_bytes() == before


async def test_a_store_of_another_schema_version_is_refused(path: Path) -> None:
    await open_store(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(StoreError, match=r"has schema version 7; this agl reads version 1\. Use the agl that wrote it"):
        open_store(path)


async def test_a_damaged_store_is_named(path: Path) -> None:
    store = open_store(path)
    await store.add_rollouts([RolloutCreate(rollout_id="r", input="x" * 100_000)])
    await store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    store = open_store(path)
    with pytest.raises(StoreError, match=r"The store .* is damaged \(.*\)\. Restore the file"):
        await store.get_rollout("r")
    await store.close()


async def test_damaged_token_ids_are_noticed_when_a_call_builds_on_them(path: Path) -> None:
    store = open_store(path)
    await store.add_rollouts([RolloutCreate(rollout_id="r", input={})])
    await record(store, "a")
    await store.close()
    db = sqlite3.connect(path)
    db.execute("UPDATE answers SET tail = x'0100000009000000'")
    db.commit()
    db.close()
    store = open_store(path)
    with pytest.raises(StoreError, match=r"The prompt of call a does not match its digest\. Restore the store file\."):
        await record(store, "b")
    await store.close()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"The store .*gone/s\.sqlite3 cannot be opened .* Check that its folder exists"
    ):
        open_store(tmp_path / "gone" / "s.sqlite3")


async def test_a_second_gateway_is_refused_until_the_first_has_closed(path: Path) -> None:
    first = open_store(path)
    with pytest.raises(StoreError) as caught:
        open_store(path)
    assert str(caught.value) == (
        f"Another gateway has the store {path} open. Stop it with `agl down`, or use another project folder."
    )
    assert (await first.counts())["rollouts.queuing"] == 0, "the refusal takes nothing from the first"
    await first.close()
    await open_store(path).close()


async def test_the_lock_of_a_killed_process_is_free(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match="Another gateway has the store"):
            open_store(path)
        holder.kill()
        holder.wait(30)
    await open_store(path).close()
