"""The store's file: its schema, how it is opened and locked, and what SQLite's errors mean.

One process writes: it holds an exclusive lock on `<file>.lock` for as long as the store is open, and the system lets go
of it when the process dies. The file is in WAL mode, and a commit hands its bytes to the system without waiting for
the disk (`synchronous = NORMAL`): what was acknowledged survives kill -9 of any process. A loss of power, or of the
whole machine, can take the last transactions back, as if they had not been; it never leaves a damaged file. What was
trained is not learnt from here then: a checkpoint's own folder, flushed to the disk, is what a trainer resumes from.
`PRAGMA user_version` names the schema.

Rows that change (rollouts, calls) are short; what is written once and may be long (requests, answers, blobs) stands in
tables of its own. Deleting a rollout takes everything that belongs to it along.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from agl_runtime.errors import StoreError

SCHEMA_VERSION = 1
APPLICATION_ID = 0x41474C31
BUSY_TIMEOUT_S = 5.0

_SCHEMA = """
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO counters VALUES ('finished', 0);
CREATE TABLE rollouts (
    n INTEGER PRIMARY KEY AUTOINCREMENT, rollout_id TEXT NOT NULL UNIQUE, is_train INTEGER NOT NULL,
    data_id TEXT NOT NULL, body BLOB NOT NULL,
    state TEXT NOT NULL, k8s_job_name TEXT, last_attempt_id TEXT, error_message TEXT, version INTEGER NOT NULL,
    created_at REAL NOT NULL, updated_at REAL NOT NULL,
    holder TEXT, lease_until REAL, finished INTEGER UNIQUE
);
CREATE INDEX rollouts_by_state ON rollouts (state, n);
CREATE TABLE attempts (
    n INTEGER PRIMARY KEY AUTOINCREMENT, rollout INTEGER NOT NULL REFERENCES rollouts (n) ON DELETE CASCADE,
    attempt_id TEXT NOT NULL, sealed INTEGER NOT NULL DEFAULT 0, UNIQUE (rollout, attempt_id)
);
CREATE TABLE events (
    n INTEGER PRIMARY KEY, attempt INTEGER NOT NULL REFERENCES attempts (n) ON DELETE CASCADE,
    event_id TEXT, event_type TEXT NOT NULL, created_at REAL NOT NULL, data BLOB NOT NULL, UNIQUE (attempt, event_id)
);
CREATE TABLE calls (
    n INTEGER PRIMARY KEY, call_id TEXT NOT NULL UNIQUE,
    attempt INTEGER NOT NULL REFERENCES attempts (n) ON DELETE CASCADE, seq INTEGER NOT NULL, created_at REAL NOT NULL,
    dialect TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL, parent_id TEXT, retry_key TEXT,
    commit_seq INTEGER, trainable INTEGER NOT NULL DEFAULT 0, reason TEXT, finish_reason TEXT, http_status INTEGER,
    delivered INTEGER NOT NULL DEFAULT 0, continued INTEGER NOT NULL DEFAULT 0, retried INTEGER NOT NULL DEFAULT 0,
    UNIQUE (attempt, seq)
);
CREATE TABLE requests (
    call INTEGER PRIMARY KEY REFERENCES calls (n) ON DELETE CASCADE, base_id TEXT, record BLOB NOT NULL,
    digest BLOB NOT NULL
);
CREATE TABLE answers (
    call INTEGER PRIMARY KEY REFERENCES calls (n) ON DELETE CASCADE, base_id TEXT, keep INTEGER NOT NULL,
    tail BLOB NOT NULL, digest BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL,
    response BLOB NOT NULL, extra BLOB NOT NULL
);
CREATE TABLE blobs (digest BLOB PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE blob_uses (
    rollout INTEGER NOT NULL REFERENCES rollouts (n) ON DELETE CASCADE, digest BLOB NOT NULL,
    PRIMARY KEY (rollout, digest)
) WITHOUT ROWID;
CREATE INDEX blob_uses_by_digest ON blob_uses (digest);
CREATE TABLE checkpoints (
    n INTEGER PRIMARY KEY, run_id TEXT NOT NULL, version TEXT NOT NULL, record TEXT NOT NULL, UNIQUE (run_id, version)
);
"""


def lock(path: Path) -> sqlite3.Connection:
    """Take the file's writer lock; closing the connection gives it back. Raises StoreError when another has it."""
    holder = _connect(path, ".lock", timeout_s=0.0)
    try:
        holder.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        holder.close()
        if code(error) != sqlite3.SQLITE_BUSY:
            raise explain(error, path) from error
        raise StoreError(
            f"Another gateway has the store {path} open.", "Stop it with `agl down`, or use another project folder."
        ) from error
    return holder


def open_writer(path: Path) -> sqlite3.Connection:
    """Open or create the file. The caller holds the lock. Raises StoreError for what is no store of this version."""
    db = _connect(path, timeout_s=BUSY_TIMEOUT_S)
    try:
        _prepare(db, path)
    except sqlite3.Error as error:
        db.close()
        raise explain(error, path) from error
    except StoreError:
        db.close()
        raise
    return db


def open_reader(path: Path) -> sqlite3.Connection:
    db = _connect(path, timeout_s=BUSY_TIMEOUT_S)
    db.execute("PRAGMA query_only = ON")
    return db


def wait_for_others(db: sqlite3.Connection, timeout_s: float) -> None:
    """How long the connection waits for a file that another program has locked."""
    db.execute(f"PRAGMA busy_timeout = {round(timeout_s * 1000)}")


def copy_log(db: sqlite3.Connection) -> None:
    """Copy the write-ahead log into the file, as far as readers allow, and wait for the disk. What is not copied now is
    copied next time, or when the store is closed."""
    with contextlib.suppress(sqlite3.Error):
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def explain(error: sqlite3.Error, path: Path) -> StoreError:
    """What an error of SQLite means for the user."""
    what, fix = {
        sqlite3.SQLITE_FULL: ("The disk that holds the store {} is full", "Free some space; nothing recorded is lost."),
        sqlite3.SQLITE_NOTADB: ("{} is not a store of agl", "Move the file away, or use another project folder."),
        sqlite3.SQLITE_CORRUPT: ("The store {} is damaged", "Restore the file, or move it away to begin anew."),
        sqlite3.SQLITE_BUSY: ("Another program has the store {} locked", "End the program that uses the file."),
        sqlite3.SQLITE_CANTOPEN: ("The store {} cannot be opened", "Check that its folder exists and is yours."),
        sqlite3.SQLITE_READONLY: ("The store {} cannot be written", "Check the permissions of file and folder."),
        sqlite3.SQLITE_IOERR: ("The disk failed on the store {}", "Check the disk; nothing acknowledged is lost."),
    }.get(code(error), ("The store {} failed", "Look at `agl logs gateway`."))
    return StoreError(f"{what.format(path)} ({error}).", fix)


def code(error: Exception) -> int:
    """SQLite's primary result code, 0 for any other error."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _connect(path: Path, suffix: str = "", *, timeout_s: float) -> sqlite3.Connection:
    try:
        # Each connection is used by one thread at a time, not always the one that opened it.
        db = sqlite3.connect(f"{path}{suffix}", timeout=timeout_s, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise explain(error, path) from error
    db.row_factory = sqlite3.Row
    return db


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    is_new = db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None
    version = _pragma(db, "user_version")
    if not is_new and _pragma(db, "application_id") != APPLICATION_ID:
        raise StoreError(
            f"{path} is a database of another program.", "Move the file away, or use another project folder."
        )
    if not is_new and version != SCHEMA_VERSION:
        raise StoreError(
            f"The store {path} has schema version {version}; this agl reads version {SCHEMA_VERSION}.",
            "Use the agl that wrote it, or move the file away to begin anew.",
        )
    if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise StoreError(f"The disk that holds {path} cannot keep a write-ahead log.", "Use a local disk.")
    # fullfsync: on macOS only this reaches the medium.
    # The log is copied by `copy_log`; only where a few writes were huge, SQLite does it of itself.
    for setting in (
        "synchronous = NORMAL",
        "fullfsync = ON",
        "foreign_keys = ON",
        "journal_size_limit = 67108864",
        "wal_autocheckpoint = 32768",
    ):
        db.execute(f"PRAGMA {setting}")
    if is_new:
        identity = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
        db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {identity} COMMIT;")


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
