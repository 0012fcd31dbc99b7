"""The embedded backend: one process that serves the policy to many agents and trains the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agl_runtime.errors import PreconditionError

if TYPE_CHECKING:
    from agl_runtime.config import Config
    from agl_runtime.trainer.backends.base import Backend


def create(config: Config, policy: Path) -> Backend:
    """Imports torch and transformers. Raises PreconditionError where one of them is missing."""
    try:
        from agl_runtime.trainer.backends.embedded.backend import EmbeddedBackend
    except ModuleNotFoundError as error:
        raise PreconditionError(
            f"The embedded backend needs the package {error.name}, which is not installed here.",
            "Install agl with its extra: `pip install 'agl[embedded]'`.",
        ) from error
    return EmbeddedBackend(config, policy)
