from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agl_runtime.config import Config
from agl_runtime.errors import PreconditionError
from agl_runtime.trainer.backends import embedded


def test_the_package_imports_without_torch() -> None:
    code = "import sys, agl_runtime.trainer.backends.embedded; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "agl_runtime.trainer.backends.embedded.backend", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("agl_runtime.trainer.backends.embedded.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(PreconditionError) as caught:
        embedded.create(Config.model_validate({"agent": {"command": "agent"}}), Path("policy"))
    assert caught.value.what == "The embedded backend needs the package transformers, which is not installed here."
    assert "agl[embedded]" in caught.value.fix
