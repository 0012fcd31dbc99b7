"""The environment of an agent: what passes from the user's shell, what is private, and what the gateway is called.

Nothing passes that is not listed here or in `agent.pass_env`; so agl's key, its own virtual environment and its
PYTHONPATH never reach an agent. The gateway's variables beat `agent.env`, so that no redirect is undone by accident.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agl_runtime.controller.runners.command import MOST_BYTES, TaskPlace, render
from agl_runtime.errors import ConfigError
from agl_runtime.schemas import Grant

# fmt: off
PASSED = frozenset((
    "PATH", "LANG", "LANGUAGE", "TZ", "TERM", "COLORTERM", "USER", "LOGNAME", "SHELL",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYENV_ROOT", "PYENV_VERSION", "PYTHONUSERBASE",
    "PYTHONUTF8", "PYTHONUNBUFFERED", "NVM_DIR", "VOLTA_HOME", "ASDF_DIR", "ASDF_DATA_DIR", "MISE_DATA_DIR",
    "RUSTUP_HOME", "CARGO_HOME", "GOROOT", "JAVA_HOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
))
# fmt: on
"""Variables of the user's shell that every agent gets: where programs, languages and certificates are, and proxies."""

PASSED_PREFIXES = ("LC_", "OPENBLAS_", "OMP_", "MKL_")
"""Further variables that every agent gets, by the beginning of their names."""

TREE_VARIABLE = "AGL_TREE"
"""Marks every process of one attempt, so that all of them can be found where no namespace holds them together."""

_NAME = re.compile(r"[^=\0]+")


@dataclass(frozen=True, slots=True)
class Installation:
    """Where agl itself runs: `prefix` of its virtual environment, or None outside one."""

    prefix: Path | None

    @classmethod
    def current(cls) -> Installation:
        return cls(Path(sys.prefix) if sys.prefix != sys.base_prefix else None)


def user_path(environ: Mapping[str, str], agl: Installation) -> str:
    """PATH without the programs of agl's own virtual environment, unless the user has activated that one."""
    path = environ.get("PATH", os.defpath)
    if agl.prefix is None or _same(environ.get("VIRTUAL_ENV"), agl.prefix):
        return path
    return os.pathsep.join(part for part in path.split(os.pathsep) if not _same(part, agl.prefix / "bin"))


def _same(path: str | None, other: Path) -> bool:
    return bool(path) and os.path.realpath(str(path)) == os.path.realpath(other)


def passed(environ: Mapping[str, str], pass_env: list[str], agl: Installation) -> dict[str, str]:
    """The part of the user's environment that an agent gets."""
    names = PASSED | set(pass_env)
    chosen = {name: value for name, value in environ.items() if name in names or name.startswith(PASSED_PREFIXES)}
    chosen["PATH"] = user_path(environ, agl)
    user_base = Path(environ.get("HOME", "/")) / ".local"
    if (user_base / "lib").is_dir():  # packages that the user installed without root stay importable
        chosen.setdefault("PYTHONUSERBASE", str(user_base))
    if any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in chosen):
        for name in ("NO_PROXY", "no_proxy"):  # the gateway is never behind the proxy
            chosen[name] = ",".join(filter(None, [chosen.get(name), "127.0.0.1", "localhost"]))
    return chosen


def private(home: Path, tmp: Path) -> dict[str, str]:
    """Where this attempt alone keeps its files."""
    return {"HOME": str(home), **dict.fromkeys(("TMPDIR", "TEMP", "TMP", "TMUX_TMPDIR"), str(tmp))}


def gateway_variables(gateway_url: str, grant: Grant) -> dict[str, str]:
    """The model's address and key under the SDKs' own names and under those of Agent Lightning v1.0."""
    rollout, attempt_id = grant.rollout, grant.attempt_id
    base = f"{gateway_url}/proxy/rollout/{rollout.rollout_id}/attempt/{attempt_id}/mode/{rollout.mode}"
    openai, anthropic = f"{base}/openai/v1", f"{base}/anthropic"
    return {
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE", "AGL_OPENAI_BASE_URL"), openai),
        "ANTHROPIC_BASE_URL": anthropic,
        **dict.fromkeys(
            ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AGL_KEY"),
            grant.agent_key,
        ),
        "AGL_EVENT_URL": f"{gateway_url}/api/rollouts/{rollout.rollout_id}/attempt/{attempt_id}/events",
        "AGL_ROLLOUT_ID": rollout.rollout_id,
    }


def configured(env: Mapping[str, str], task: TaskPlace, setting: str = "agent.env") -> dict[str, str]:
    """The variables of `setting` with the task's fields. Raises ConfigError."""
    made = {}
    for name, template in env.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{setting}: {name!r} is no name for a variable.", "Remove the = or NUL from it.")
        made[name] = render(template, task, f"{setting}.{name}", MOST_BYTES - len(name.encode()) - 1)
    return made


def mapped(env_map: Mapping[str, str], task: TaskPlace) -> dict[str, str]:
    """Agent Lightning v1.0's mapping: "input" is the whole task, "input.a.b" a field of it, all else itself."""
    templates = {}
    for name, path in env_map.items():
        if path == "input" or path.startswith("input."):
            templates[name] = "{" + path + "}"
        else:
            templates[name] = path.replace("{", "{{").replace("}", "}}")
    return configured(templates, replace(task, value={"input": task.value}), "config.local.env_map")
