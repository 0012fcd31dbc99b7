from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agl_cli import preload
from agl_cli.preload import modules_to_preload, top_imports


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter for which slow and quick are installed, and threaded leaves a thread."""
    lib = tmp_path / "lib"
    lib.mkdir()
    busy = "import time\nwhile time.process_time() < 0.25: pass\n"
    (lib / "slow.py").write_text(busy)
    (lib / "broken.py").write_text(busy + "raise RuntimeError\n")
    (lib / "quick.py").write_text("")
    (lib / "threaded.py").write_text(
        busy + "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    program = tmp_path / "python3"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={lib} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return str(program)


def proposed(tmp_path: Path, python: str, source: str) -> list[str]:
    (tmp_path / "agent").mkdir(exist_ok=True)
    (tmp_path / "agent" / "agent.py").write_text(source)
    return modules_to_preload(tmp_path / "agent", python, [python, "agent.py", "{q}"])


def test_slow_modules_that_can_be_shared_are_proposed(tmp_path: Path, python: str) -> None:
    assert proposed(tmp_path, python, "import quick, slow, json\nfrom absent import x\n") == ["slow"]
    assert proposed(tmp_path, python, "import broken\n") == []
    assert proposed(tmp_path, python, "import slow, threaded\n") == []
    assert proposed(tmp_path, python, "def (:") == []
    assert proposed(tmp_path, "/nowhere/python3", "import slow\n") == []


def test_a_module_of_the_agents_own_is_not(tmp_path: Path, python: str) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "slow.py").write_text("")
    assert proposed(tmp_path, python, "import slow\n") == []


def test_what_a_package_imports_at_its_first_call_comes_with_it(
    tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(preload.AT_FIRST_CALL, "slow", ("absent.inner", "quick", "absent"))
    assert proposed(tmp_path, python, "import slow\n") == ["slow", "quick"]


def test_only_a_script_of_python_is_looked_at(tmp_path: Path, python: str) -> None:
    (tmp_path / "agent.py").write_text("import slow\n")
    for command in (["bash", "agent.py"], [python, "-m", "agent"], [python, "absent.py"]):
        assert modules_to_preload(tmp_path, python, command) == []


def test_imports_inside_functions_and_of_the_package_itself_do_not_count() -> None:
    source = b"import os, a.b\nfrom c.d import e\nfrom . import f\nfrom .g import h\ndef i():\n    import j\nimport a\n"
    assert top_imports(source) == ["a", "c"]


def test_the_calculators_agent_spares_itself_openai() -> None:
    example = Path(__file__).parents[3] / "examples" / "calculator"
    modules = modules_to_preload(example, sys.executable, [sys.executable, "agent.py"])
    assert modules[0] == "openai"
    assert "openai.resources.chat.completions.completions" in modules
