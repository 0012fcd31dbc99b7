"""The built wheel, installed alone: base dependencies only, on every supported Python."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.environments import environment, interpreter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("agl-*.whl"))


@pytest.fixture(params=["3.11", "3.12", "3.13"])
def python(request: pytest.FixtureRequest, wheel: Path) -> Path:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return environment(interpreter(request.param), [str(wheel)], key=digest) / "python"


def run(python: Path, code: str, cwd: Path) -> str:
    done = subprocess.run([python, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_of_the_base_install_imports_without_torch(python: Path, tmp_path: Path) -> None:
    code = """
import importlib, pkgutil, sys, agl_cli, agl_runtime
heavy = ("agl_runtime.algorithms", "agl_runtime.trainer.backends.embedded", "agl_runtime.trainer.backends.verl")
for package in (agl_cli, agl_runtime):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(heavy) and "__main__" not in module.name:
            importlib.import_module(module.name)
assert "torch" not in sys.modules
"""
    run(python, code, tmp_path)


def test_the_command_runs_and_prepares_a_folder_from_its_own_templates(python: Path, tmp_path: Path) -> None:
    agl = python.parent / "agl"
    (tmp_path / "agent.py").write_text("import sys, openai\nprint(sys.argv)\n", encoding="utf-8")
    shown = subprocess.run([agl, "--help"], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert "init" in shown
    done = subprocess.run([agl, "init", "--yes"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "agl.yaml").exists()


def test_templates_skills_and_the_example_come_along(python: Path, tmp_path: Path) -> None:
    code = """
from agl_cli.resources import resource
for name in ("templates/agl.yaml.j2", "skills/agl", "examples/calculator/agent.py", "examples/calculator/policy"):
    path = resource(name)
    assert path.exists() and "site-packages" in str(path), path
"""
    run(python, code, tmp_path)


def test_a_users_own_packages_are_not_shadowed(python: Path, tmp_path: Path) -> None:
    for name in ("runtime", "templates", "skills", "examples", "tests"):
        code = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
        assert run(python, code, tmp_path) == "None", name
