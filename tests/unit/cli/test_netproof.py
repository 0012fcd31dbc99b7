from __future__ import annotations

from pathlib import Path

import pytest

from agl_cli import netproof
from agl_runtime.errors import PreconditionError


def test_a_proof_says_what_was_there_and_what_was_tried() -> None:
    assert str(netproof.Proof(["lo"], 0)) == "network: only lo was there; nothing tried to go anywhere else"
    assert str(netproof.Proof(["lo"], 3)) == "network: only lo was there; 3 sends tried to go, in vain, anywhere else"


def test_without_unshare_there_is_no_proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreconditionError, match="--prove needs Linux and util-linux's unshare"):
        netproof.cut_off(["run"])


def test_a_system_without_namespaces_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuses = tmp_path / "unshare"
    refuses.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n", encoding="utf-8")
    refuses.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreconditionError, match=r"no network namespace here \(unshare failed: Operation not permitted"):
        netproof.cut_off(["run"])
