"""How JSON bodies are kept small: pure functions from bodies to records and back.

A model call resends nearly all of the request before it. A body is therefore cut into pieces (the items of a top-level
list, stretches of a long top-level text or of a long list of token ids, any other value as one piece), and a record
keeps, key by key, how many leading pieces equal those of a base body and then the new pieces. It works for any dialect:
`messages`, `input`, `prompt` and `tools` are all top-level keys.

Large strings (an image's data: URL, a tool's output) and large parts leave the record for a table of blobs, each named
by its digest, so that equal content is stored once. A record carries the digest of the whole body, which `decode`
checks. Values come back equal, key order included.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import msgpack
import orjson

from agl_runtime.errors import StoreError

P = ParamSpec("P")
T = TypeVar("T")
LARGE_CHARS = 512
PIECE_CHARS = 1024
PIECE_IDS = 256
DIGEST_BYTES = 16

# Inside packed JSON a dict with this one key refers to a blob; keys of bodies that begin with it get one more.
_MARK = "\0"
_MARK_IN_TEXT = b"\\u0000"
_RESTORE_FIX = "Restore the store file."

Blobs = dict[bytes, bytes]
Fetch = Callable[[bytes], bytes]
Pieces = tuple[str, list[Any]]
Outline = Mapping[str, tuple[str, tuple[bytes, ...]]]
"""A body by its keys: the kind of each part and the digests of its pieces."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A body as stored. `blobs` are those that its record refers to, by digest."""

    base_id: str | None
    record: bytes
    digest: bytes
    outline: Outline
    blobs: Blobs


@dataclass(frozen=True, slots=True)
class Decoded:
    """A body rebuilt. It shares its pieces with the bodies that it was rebuilt from: read it, do not change it."""

    body: dict[str, Any]
    outline: Outline


def digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def checked(digest: bytes, content: bytes | None) -> bytes:
    """`content` if it is what `digest` names. Raises StoreError."""
    if content is None:
        raise StoreError(f"The store lacks the content {digest.hex()}.", _RESTORE_FIX)
    if digest_of(content) != digest:
        raise StoreError(f"The stored content {digest.hex()} does not match its digest.", _RESTORE_FIX)
    return content


def _storing(function: Callable[P, T]) -> Callable[P, T]:
    """What JSON cannot express becomes StoreError."""

    @functools.wraps(function)
    def storing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (RecursionError, TypeError, ValueError) as error:
            what = f"A body cannot be stored as JSON ({error})."
            raise StoreError(what, "Send plain JSON values, less nested.") from error

    return storing


@_storing
def pack(value: Any, blobs: Blobs) -> bytes:
    """JSON text of `value`, large content moved to `blobs`. Raises StoreError for what JSON cannot express."""
    text, write = _written(value)
    if len(text) < LARGE_CHARS and _MARK_IN_TEXT not in text:
        return text
    text = write(_lift(value, blobs))
    return text if len(text) < LARGE_CHARS else write(_refer("json", text, blobs))


def unpack(text: bytes, fetch: Fetch) -> Any:
    """Inverse of `pack`; `fetch` gives a blob's content by digest."""
    value = _from_text(text)
    return _restore(value, fetch) if _MARK_IN_TEXT in text else value


@_storing
def encode(body: Mapping[str, Any], bases: Mapping[str, Outline]) -> Encoded:
    """The record of `body` against the one of `bases` with which it shares most; later ones win a draw.

    Raises StoreError for what JSON cannot express.
    """
    blobs: Blobs = {}
    split = {key: _split(value) for key, value in body.items()}
    outline = {key: (kind, _digests(pieces)) for key, (kind, pieces) in split.items()}
    base_id, most = None, 0
    for candidate_id, candidate in bases.items():
        shared = sum([_shared(part, candidate.get(key)) for key, part in outline.items()])
        if shared and shared >= most:
            base_id, most = candidate_id, shared
    base = bases[base_id] if base_id is not None else {}
    parts = []
    for key, (kind, pieces) in split.items():
        keep = _shared(outline[key], base.get(key))
        tail_digests = b"".join(outline[key][1][keep:])
        parts.append([key, kind, keep, tail_digests, pack(pieces[keep:], blobs)])
    return Encoded(base_id, _pack_record(parts), _whole_digest(outline), outline, blobs)


def decode(record: bytes, digest: bytes, base: Decoded | None, fetch: Fetch) -> Decoded:
    """Inverse of `encode`; `base` is the body of `base_id`. Raises StoreError when the digest is another."""
    body: dict[str, Any] = {}
    outline: dict[str, tuple[str, tuple[bytes, ...]]] = {}
    for key, kind, keep, _, packed in _unpack_record(record):
        tail = unpack(packed, fetch)
        head: list[Any] = []
        head_digests: tuple[bytes, ...] = ()
        if keep and base is not None and key in base.body:
            head, head_digests = _split(base.body[key])[1][:keep], base.outline[key][1][:keep]
        body[key] = _join(kind, head + tail)
        outline[key] = (kind, head_digests + _digests(tail))
    if _whole_digest(outline) != digest:
        raise StoreError("A stored request does not match its digest.", _RESTORE_FIX)
    return Decoded(body, outline)


def outline_of(record: bytes, base: Outline | None) -> Outline:
    """The outline of a stored body, without its content."""
    outline = {}
    for key, kind, keep, tail, _ in _unpack_record(record):
        head = base[key][1][:keep] if keep and base is not None else ()
        new = tuple(tail[i : i + DIGEST_BYTES] for i in range(0, len(tail), DIGEST_BYTES))
        outline[key] = (kind, head + new)
    return outline


def covers(new: Outline, old: Outline) -> bool:
    """Whether whatever a later body shares with `old` it also shares with `new`."""
    return all(_shared(part, new.get(key)) == len(part[1]) for key, part in old.items())


def _digest_text(value: Any) -> bytes:
    """The same text for the same value, for ever: digests are of it."""
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError:
        return _any_text(value)
    return _any_text(value) if b"null" in text else text  # which NaN and Infinity are too


def _written(value: Any) -> tuple[bytes, Callable[[Any], bytes]]:
    """Text from which `_from_text` makes the same value, and what writes such text of it and of its parts."""
    try:
        text = orjson.dumps(value)
    except orjson.JSONEncodeError:
        return _any_text(value), _any_text
    if b"null" in text and not _is_finite(value):
        return _any_text(value), _any_text
    return text, orjson.dumps


def _any_text(value: Any) -> bytes:
    # The standard encoder takes a multiple of the time. Bodies may hold integers beyond 64 bits and lone surrogates.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all([_is_finite(item) for item in value.values()])
    if isinstance(value, list | tuple):
        return all([_is_finite(item) for item in value])
    return not isinstance(value, float) or math.isfinite(value)


def _from_text(text: bytes) -> Any:
    return json.loads(text.decode("utf-8", "surrogatepass"))


def _split(value: Any) -> Pieces:
    if isinstance(value, str) and len(value) > PIECE_CHARS:
        return "text", [value[i : i + PIECE_CHARS] for i in range(0, len(value), PIECE_CHARS)]
    if isinstance(value, list):
        if len(value) > PIECE_IDS and all(type(item) is int for item in value):
            return "ids", [value[i : i + PIECE_IDS] for i in range(0, len(value), PIECE_IDS)]
        return "list", value
    return "value", [value]


def _join(kind: str, pieces: list[Any]) -> Any:
    if kind == "text":
        return "".join(pieces)
    if kind == "ids":
        return [item for piece in pieces for item in piece]
    return pieces if kind == "list" else pieces[0]


def _digests(pieces: list[Any]) -> tuple[bytes, ...]:
    return tuple([digest_of(_digest_text(piece)) for piece in pieces])


def _shared(part: tuple[str, tuple[bytes, ...]], other: tuple[str, tuple[bytes, ...]] | None) -> int:
    """Number of leading pieces that two parts of the same kind share."""
    if other is None or other[0] != part[0]:
        return 0
    pairs = zip(part[1], other[1], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(part[1]), len(other[1])))


def _whole_digest(outline: Outline) -> bytes:
    return digest_of(_pack_record([[key, kind, b"".join(digests)] for key, (kind, digests) in outline.items()]))


def _pack_record(parts: list[list[Any]]) -> bytes:
    return bytes(msgpack.packb(parts, unicode_errors="surrogatepass"))


def _unpack_record(record: bytes) -> list[list[Any]]:
    parts: list[list[Any]] = msgpack.unpackb(record, unicode_errors="surrogatepass")
    return parts


def _refer(kind: str, content: bytes, blobs: Blobs) -> dict[str, list[str]]:
    digest = digest_of(content)
    blobs[digest] = content
    return {_MARK: [kind, digest.hex()]}


def _lift(value: Any, blobs: Blobs) -> Any:
    if isinstance(value, str) and len(value) >= LARGE_CHARS:
        return _refer("text", value.encode("utf-8", "surrogatepass"), blobs)
    if isinstance(value, (list, tuple)):
        return [_lift(item, blobs) for item in value]
    if isinstance(value, dict):
        return {_MARK + k if k.startswith(_MARK) else k: _lift(item, blobs) for k, item in value.items()}
    return value


def _restore(value: Any, fetch: Fetch) -> Any:
    if isinstance(value, list):
        return [_restore(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {k.removeprefix(_MARK): _restore(item, fetch) for k, item in value.items()}
    kind, name = value[_MARK]
    digest = bytes.fromhex(name)
    content = checked(digest, fetch(digest))
    return unpack(content, fetch) if kind == "json" else content.decode("utf-8", "surrogatepass")
