from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_torch_of_an_active_environment_is_not_taken_for_that_of_the_python_behind_it(tmp_path: Path) -> None:
    active, made = tmp_path / "active", tmp_path / "made"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", active], check=True)
    (packages,) = active.glob("lib/python*/site-packages")
    (packages / "torch.py").write_text("__version__ = '0.0.active'")
    without_index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    told = {"PYTHON": str(active / "bin" / "python"), "VENV": str(made), "TORCH_INDEX": "", **without_index}
    ended = subprocess.run(
        ["sh", "./setup.sh"], cwd=ROOT, env=os.environ | told, capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert f"Setting up {made}." in ended.stderr
    assert "0.0.active" not in ended.stderr
