"""What an agent finds in its environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.controller.runners.command import MOST_BYTES, TaskPlace
from agl_runtime.controller.runners.environment import (
    Installation,
    configured,
    gateway_variables,
    mapped,
    passed,
    private,
    user_path,
)
from agl_runtime.errors import ConfigError
from fakes.claims import granted

OUTSIDE = Installation(None)


def place(task: Any) -> TaskPlace:
    return TaskPlace(task, "t1", "/task.json")


def test_only_listed_variables_pass() -> None:
    environ = {"PATH": "/bin", "LC_ALL": "C", "AGL_KEY": "k", "PYTHONPATH": "/agl", "SECRET": "s", "HOME": "/h"}
    assert passed(environ, [], OUTSIDE) == {"PATH": "/bin", "LC_ALL": "C"}
    assert passed(environ, ["SECRET", "ABSENT"], OUTSIDE)["SECRET"] == "s"


def test_agls_own_virtual_environment_is_not_on_the_agents_path(tmp_path: Path) -> None:
    agl = Installation(tmp_path / "venv")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "venv" / "bin")
    path = os.pathsep.join([str(tmp_path / "venv" / "bin"), "/usr/bin", str(tmp_path / "link"), "/bin"])
    assert user_path({"PATH": path}, agl) == "/usr/bin:/bin"
    assert user_path({"PATH": path, "VIRTUAL_ENV": "/other"}, agl) == "/usr/bin:/bin"


def test_an_environment_that_the_user_activated_stays_on_the_path(tmp_path: Path) -> None:
    path = f"{tmp_path}/venv/bin:/usr/bin"
    environ = {"PATH": path, "VIRTUAL_ENV": f"{tmp_path}/venv"}
    assert user_path(environ, Installation(tmp_path / "venv")) == path


def test_packages_of_the_users_own_site_stay_importable(tmp_path: Path) -> None:
    (tmp_path / ".local" / "lib").mkdir(parents=True)
    assert passed({"HOME": str(tmp_path)}, [], OUTSIDE)["PYTHONUSERBASE"] == str(tmp_path / ".local")
    assert passed({"HOME": str(tmp_path), "PYTHONUSERBASE": "/x"}, [], OUTSIDE)["PYTHONUSERBASE"] == "/x"


def test_the_gateway_is_reached_without_the_proxy() -> None:
    environ = {"HTTP_PROXY": "http://proxy", "NO_PROXY": "intranet"}
    chosen = passed(environ, [], OUTSIDE)
    assert chosen["NO_PROXY"] == "intranet,127.0.0.1,localhost"
    assert chosen["no_proxy"] == "127.0.0.1,localhost"
    assert "NO_PROXY" not in passed({}, [], OUTSIDE)


def test_home_and_temporary_files_are_private() -> None:
    made = private(Path("/h"), Path("/t"))
    assert made["HOME"] == "/h"
    assert {made[name] for name in ("TMPDIR", "TEMP", "TMP", "TMUX_TMPDIR")} == {"/t"}


def test_the_model_is_named_under_the_sdks_names_and_those_of_v1() -> None:
    base = "http://g/proxy/rollout/r1/attempt/2/mode/val"
    assert gateway_variables("http://g", granted("r1", attempt_id="2", is_train=False)) == {
        "OPENAI_BASE_URL": f"{base}/openai/v1",
        "OPENAI_API_BASE": f"{base}/openai/v1",
        "AGL_OPENAI_BASE_URL": f"{base}/openai/v1",
        "ANTHROPIC_BASE_URL": f"{base}/anthropic",
        "OPENAI_API_KEY": "agent-key",
        "ANTHROPIC_API_KEY": "agent-key",
        "AGL_KEY": "agent-key",
        "AGL_EVENT_URL": "http://g/api/rollouts/r1/attempt/2/events",
        "AGL_ROLLOUT_ID": "r1",
    }


def test_configured_variables_hold_fields_of_the_task() -> None:
    assert configured({"Q": "{q}", "F": "{task_file}"}, place({"q": "-x"})) == {"Q": "-x", "F": "/task.json"}


def test_a_variables_name_counts_for_its_length() -> None:
    most = MOST_BYTES - len("NAME=")
    assert len(configured({"NAME": "{q}"}, place({"q": "x" * most}))["NAME"]) == most
    with pytest.raises(ConfigError, match=r"agent\.env\.NAME of task t1 is .* holds"):
        configured({"NAME": "{q}"}, place({"q": "x" * (most + 1)}))


def test_a_name_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="'A=B' is no name for a variable"):
        configured({"A=B": "x"}, place({}))


def test_v1s_mapping_takes_paths_of_the_input_and_literals() -> None:
    env_map = {"ALL": "input", "A": "input.a.0", "TEXT": "as {it} is"}
    assert mapped(env_map, place({"a": [7]})) == {"ALL": '{"a": [7]}', "A": "7", "TEXT": "as {it} is"}
    with pytest.raises(ConfigError, match=r"config\.local\.env_map\.B"):
        mapped({"B": "input.b"}, place({}))
