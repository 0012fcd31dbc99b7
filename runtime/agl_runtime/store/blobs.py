"""Content stored once by its digest, and which rollouts use it."""

from __future__ import annotations

import sqlite3
from typing import Any

from agl_runtime.store import codec


def put_json(db: sqlite3.Connection, rollout: int, value: Any) -> bytes:
    """The packed text of `value`, its large content stored for the rollout numbered `rollout`."""
    blobs: codec.Blobs = {}
    text = codec.pack(value, blobs)
    keep(db, rollout, blobs)
    return text


def get_json(db: sqlite3.Connection, text: bytes) -> Any:
    """Inverse of `put_json`. Raises StoreError when content is missing or damaged."""
    return codec.unpack(text, fetcher(db))


def keep(db: sqlite3.Connection, rollout: int, blobs: codec.Blobs) -> None:
    if not blobs:
        return
    db.executemany("INSERT OR IGNORE INTO blobs VALUES (?, ?)", blobs.items())
    db.executemany("INSERT OR IGNORE INTO blob_uses VALUES (?, ?)", [(rollout, digest) for digest in blobs])


def fetcher(db: sqlite3.Connection) -> codec.Fetch:
    def fetch(digest: bytes) -> bytes:
        row = db.execute("SELECT content FROM blobs WHERE digest = ?", (digest,)).fetchone()
        return codec.checked(digest, row["content"] if row else None)

    return fetch


def used_by(db: sqlite3.Connection, rollout: int) -> list[bytes]:
    return [row["digest"] for row in db.execute("SELECT digest FROM blob_uses WHERE rollout = ?", (rollout,))]


def drop_unused(db: sqlite3.Connection, digests: list[bytes]) -> None:
    """Delete those of `digests` that no rollout uses any more."""
    db.executemany(
        "DELETE FROM blobs WHERE digest = ? AND NOT EXISTS (SELECT 1 FROM blob_uses u WHERE u.digest = blobs.digest)",
        [(digest,) for digest in digests],
    )
