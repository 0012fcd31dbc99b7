"""Which modules are worth importing once for all agents: found by importing them in the user's own interpreter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from agl_runtime.controller.runners.warm import start_of_python
from agl_runtime.errors import RunnerError

SLOW_S = 0.1
PROBE_S = 60.0
AT_FIRST_CALL = {
    "openai": ("openai.resources.chat.completions.completions", "httpcore2", "httpcore", "jiter", "encodings.idna")
}
"""What a package imports only when it is first used."""
_PROBE = """
import importlib, json, os, sys, time
found = []
for name, more in json.loads(sys.argv[1]).items():
    began = time.process_time()
    try:
        importlib.import_module(name)
        if time.process_time() - began > float(sys.argv[2]):
            found.append(name)
            for each in more:
                try:
                    importlib.import_module(each)
                    found.append(each)
                except ImportError:
                    pass
    except Exception:
        continue
print(json.dumps(found if len(os.listdir("/proc/self/task")) == 1 else []))
"""


def modules_to_preload(root: Path, python: str, command: Sequence[str]) -> list[str]:
    """The installed modules that the script of `command` imports at its top and that take a while; none where `python`
    cannot import them, or where warm starts cannot be had."""
    try:
        script = root / command[start_of_python(command)]
        names = [name for name in top_imports(script.read_bytes()) if not _is_local(root, script, name)]
    except (RunnerError, OSError, SyntaxError, ValueError):
        return []
    if not names or not sys.platform.startswith("linux"):
        return []
    wanted = json.dumps({name: AT_FIRST_CALL.get(name, ()) for name in names})
    try:
        words = [python, "-c", _PROBE, wanted, str(SLOW_S)]
        done = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=PROBE_S, check=True)
        return list(map(str, json.loads(done.stdout.splitlines()[-1])))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []


def top_imports(source: bytes) -> list[str]:
    """Top-level packages, but those of Python itself, that a module imports when it is itself imported. Raises
    SyntaxError and ValueError."""
    names = [name for node in ast.parse(source).body for name in _imported(node)]
    return [name for name in dict.fromkeys(names) if name not in sys.stdlib_module_names]


def _imported(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        yield node.module.partition(".")[0]


def _is_local(root: Path, script: Path, name: str) -> bool:
    return any((folder / file).exists() for folder in (root, script.parent) for file in (f"{name}.py", name))
