"""Edits of whole files: shown as a diff, applied, and undone byte for byte.

An `Edit` holds a file's bytes before (None: the file is new) and after. `apply` keeps the bytes before in
`.agl/init/`, so that `undo` restores every file that still is as `apply` left it, and refuses to touch one that is not.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from agl_runtime.errors import ConfigError

MANIFEST = "init/manifest.json"
EDITED = "edited"


@dataclass(frozen=True, slots=True)
class Edit:
    """`path` is relative to the project's root; `secrets` are texts in it that no diff may show."""

    path: str
    before: bytes | None
    after: bytes
    secrets: tuple[str, ...] = ()


@dataclass(slots=True)
class _Entry:
    """What `undo` needs of one file: where its bytes before are kept (None: it was new), the digest of those after."""

    path: str
    backup: str | None
    after: str


def diff(edits: Sequence[Edit]) -> str:
    """A unified diff for people, secrets masked."""
    lines: list[str] = []
    for edit in edits:
        old, new = (_masked(content or b"", edit.secrets) for content in (edit.before, edit.after))
        origin = f"a/{edit.path}" if edit.before is not None else "/dev/null"
        lines += difflib.unified_diff(old, new, origin, f"b/{edit.path}", lineterm="")
    return "\n".join(lines)


def _masked(content: bytes, secrets: Sequence[str]) -> list[str]:
    text = content.decode(errors="replace")
    for secret in secrets:
        text = text.replace(secret, "***")
    return text.splitlines()


def apply(root: Path, state_dir: Path, edits: Sequence[Edit]) -> None:
    """Write the edits. What stood before is saved first. Raises ConfigError when a file changed since planning."""
    for edit in edits:
        if _read(root / edit.path) != edit.before:
            raise ConfigError(f"{edit.path} changed while the plan was shown.", "Run `agl init` again.")
    folder = (state_dir / MANIFEST).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    entries = {entry.path: entry for entry in _manifest(state_dir)}
    for edit in edits:
        entry = entries.setdefault(edit.path, _Entry(edit.path, None, ""))
        if not entry.after and edit.before is not None:
            entry.backup = sha256(edit.path.encode()).hexdigest()[:16]
            (folder / entry.backup).write_bytes(edit.before)
        entry.after = sha256(edit.after).hexdigest()
    listed = [asdict(entry) for entry in entries.values()]
    (state_dir / MANIFEST).write_text(json.dumps(listed, indent=1), encoding="utf-8")
    for edit in edits:
        target = root / edit.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(edit.after)


@dataclass(frozen=True, slots=True)
class Undone:
    """What became of the files, by their paths in the project. `kept` were new and edited since: they stand in
    `.agl/init/edited/` now."""

    restored: tuple[str, ...]
    removed: tuple[str, ...]
    kept: tuple[str, ...]


def undo(root: Path, state_dir: Path) -> Undone:
    """Restore every file that `apply` touched, and take away those that it made. Raises ConfigError, and restores
    nothing, when one of the user's own was changed."""
    entries = _manifest(state_dir)
    if not entries:
        raise ConfigError(f"Nothing to undo: `agl init` changed no file in {root}.", "Run `agl init` first.")
    folder = (state_dir / MANIFEST).parent
    changed = [entry.path for entry in entries if entry.backup and not _is_known(root, folder / entry.backup, entry)]
    if changed:
        raise ConfigError(
            f"Changed by hand since `agl init`: {', '.join(changed)}.",
            "Restore them with your version control, or take your changes out, and run `agl init --undo` again.",
        )
    edited = [
        entry.path for entry in entries if not entry.backup and _digest(root / entry.path) not in (entry.after, None)
    ]
    for entry in entries:
        file = root / entry.path
        if entry.backup is not None:
            file.write_bytes((folder / entry.backup).read_bytes())
            (folder / entry.backup).unlink()
        elif entry.path in edited:
            kept = folder / EDITED / entry.path
            kept.parent.mkdir(parents=True, exist_ok=True)
            file.replace(kept)
        else:
            file.unlink(missing_ok=True)
    (state_dir / MANIFEST).unlink()
    return Undone(
        restored=tuple(entry.path for entry in entries if entry.backup),
        removed=tuple(entry.path for entry in entries if not entry.backup and entry.path not in edited),
        kept=tuple(edited),
    )


def _is_known(root: Path, backup: Path, entry: _Entry) -> bool:
    """Whether the user's file is as `apply` left it, as it was before, or gone."""
    return _digest(root / entry.path) in (entry.after, _digest(backup), None)


def _manifest(state_dir: Path) -> list[_Entry]:
    file = state_dir / MANIFEST
    return [_Entry(**row) for row in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []


def _read(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


def _digest(file: Path) -> str | None:
    content = _read(file)
    return sha256(content).hexdigest() if content is not None else None
