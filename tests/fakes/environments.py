"""Python environments of their own for the real tier, made when absent and kept under a name that their content gives.

They live in AGL_TEST_CACHE, or ~/.cache/agl-tests. The folder's name holds a digest of the interpreter's version and
the requirements, so a changed requirement makes a new one. A tier that cannot get what it needs is skipped with the
reason; with CI set it fails instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest

CACHE = Path(os.environ.get("AGL_TEST_CACHE") or Path.home() / ".cache" / "agl-tests")
PYENV = Path.home() / ".pyenv" / "versions"


def missing(what: str) -> NoReturn:
    """This machine lacks `what`: skip, or fail where nothing may be skipped."""
    if os.environ.get("CI"):
        pytest.fail(f"In CI this may not be skipped: {what}", pytrace=False)
    pytest.skip(what)


def interpreter(version: str) -> Path:
    """The newest installed CPython `version` ("3.12")."""
    if sys.version_info[:2] == tuple(int(part) for part in version.split(".")):
        return Path(sys.executable)
    installed = sorted(PYENV.glob(f"{version}.*/bin/python")) if PYENV.exists() else []
    found = shutil.which(f"python{version}")
    candidates = [*([Path(found)] if found else []), *reversed(installed)]
    for candidate in candidates:
        if (
            subprocess.run([candidate, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode
            == 0
        ):
            return candidate
    missing(f"no Python {version} with venv on this machine")


def environment(python: Path, requirements: Sequence[str], key: str = "") -> Path:
    """The `bin` folder of a virtual environment that holds exactly `requirements`. `key` adds to what names it."""
    version = subprocess.run([python, "-VV"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\n".join([version, *requirements, key]).encode()).hexdigest()[:16]
    folder = CACHE / f"env-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"env-{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run([python, "-m", "venv", folder])
            pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            _run([*pip, *requirements])
            (folder / "ready").touch()
    return folder / "bin"


def _run(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))} failed:\n{done.stderr[-3000:]}", pytrace=False)
