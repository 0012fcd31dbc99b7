"""Reasoning that goes out to a harness and comes back byte for byte, in a field that harnesses keep and never read.

The text is sealed with a digest, so that what another service wrote, or a harness cut, is not taken for it. It proves
nothing beyond that and need not: a harness may say anything within its own conversation.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

_MARK = "agl1."
_DIGEST_BYTES = 8


def seal(text: str) -> str:
    data = text.encode()
    return _MARK + base64.b64encode(_digest(data) + data).decode()


def unseal(sealed: Any) -> str | None:
    """None for anything that `seal` did not write."""
    if not isinstance(sealed, str) or not sealed.startswith(_MARK):
        return None
    try:
        whole = base64.b64decode(sealed[len(_MARK) :], validate=True)
        data = whole[_DIGEST_BYTES:]
        return data.decode() if whole[:_DIGEST_BYTES] == _digest(data) else None
    except ValueError:
        return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
