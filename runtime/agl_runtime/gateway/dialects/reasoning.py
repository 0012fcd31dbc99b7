"""Reasoning that goes out to a harness and comes back byte for byte, in a field that harnesses keep and never read.

The text is sealed with a digest and the id of its answer, so that what another service wrote, or a harness cut, is not
taken for it. It proves nothing beyond that and need not: a harness may say anything within its own conversation.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

_MARK = "agl2."
_DIGEST_BYTES = 8


def seal(answer_id: str, text: str) -> str:
    data = f"{answer_id}\n{text}".encode()
    return _MARK + base64.b64encode(_digest(data) + data).decode()


def unseal(sealed: Any) -> tuple[str, str] | None:
    """The answer's id and the text; None for anything that `seal` did not write."""
    if not isinstance(sealed, str) or not sealed.startswith(_MARK):
        return None
    try:
        whole = base64.b64decode(sealed[len(_MARK) :], validate=True)
        data = whole[_DIGEST_BYTES:]
        answer_id, _, text = data.decode().partition("\n")
        return (answer_id, text) if whole[:_DIGEST_BYTES] == _digest(data) else None
    except ValueError:
        return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
