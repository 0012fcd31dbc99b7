"""Logging set-up of the parts: one line a record on stderr, and nothing that a `Secrets` filter knows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class SecretFilter(logging.Filter):
    """Replaces every known secret in a record's text by `***`."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__()
        self._secrets = [secret for secret in secrets if secret]

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        for secret in self._secrets:
            text = text.replace(secret, "***")
        record.msg, record.args = text, None
        return True


def configure(level: str = "INFO", secrets: Iterable[str] = ()) -> None:
    """Send the root logger to stderr. Called once by a part's main function."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(SecretFilter(secrets))
    logging.basicConfig(level=level, handlers=[handler], force=True)
