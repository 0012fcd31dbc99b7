"""Files that come with agl: templates/, skills/ and examples/, from the wheel or from the source checkout."""

from __future__ import annotations

from pathlib import Path

from agl_runtime.errors import PreconditionError


def resource(relative: str) -> Path:
    """The path of a packaged file or folder, such as `templates/agl.yaml.j2`. Raises PreconditionError."""
    package = Path(__file__).parent
    for base in (package / "_data", package.parent):
        if (base / relative).exists():
            return base / relative
    raise PreconditionError(f"{relative} is missing from this installation of agl.", "Install agl again.")
