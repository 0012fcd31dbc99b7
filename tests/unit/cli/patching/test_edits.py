from __future__ import annotations

from pathlib import Path

import pytest

from agl_cli.patching.edits import Edit, Undone, apply, diff, undo
from agl_runtime.errors import ConfigError

BEFORE = b"a = 1\r\nkey = 'sk-1'\xff"
EDITS = [Edit("src/a.py", BEFORE, b"a = 2\n"), Edit("agl.yaml", None, b"agent: {}\n")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "a.py").write_bytes(BEFORE)
    return root


def test_undo_restores_every_byte_and_removes_what_was_new(root: Path) -> None:
    apply(root, root / ".agl", EDITS)
    assert (root / "src/a.py").read_bytes() == b"a = 2\n"
    assert undo(root, root / ".agl") == Undone(("src/a.py",), ("agl.yaml",), ())
    assert (root / "src/a.py").read_bytes() == BEFORE
    assert not (root / "agl.yaml").exists()


def test_a_second_apply_keeps_the_first_original(root: Path) -> None:
    apply(root, root / ".agl", EDITS)
    apply(root, root / ".agl", [Edit("src/a.py", b"a = 2\n", b"a = 3\n")])
    undo(root, root / ".agl")
    assert (root / "src/a.py").read_bytes() == BEFORE


def test_undo_refuses_a_file_changed_by_hand_and_restores_nothing(root: Path) -> None:
    apply(root, root / ".agl", EDITS)
    (root / "src/a.py").write_bytes(b"mine\n")
    with pytest.raises(ConfigError, match=r"Changed by hand since `agl init`: src/a\.py"):
        undo(root, root / ".agl")
    assert (root / "src/a.py").read_bytes() == b"mine\n"
    assert (root / "agl.yaml").exists()


def test_undo_takes_a_file_that_was_restored_by_other_means(root: Path) -> None:
    apply(root, root / ".agl", EDITS)
    (root / "src/a.py").write_bytes(BEFORE)
    undo(root, root / ".agl")
    assert (root / "src/a.py").read_bytes() == BEFORE


def test_undo_keeps_what_was_edited_in_a_new_file_out_of_the_way(root: Path) -> None:
    apply(root, root / ".agl", EDITS)
    (root / "agl.yaml").write_bytes(b"mine\n")
    assert undo(root, root / ".agl") == Undone(("src/a.py",), (), ("agl.yaml",))
    assert not (root / "agl.yaml").exists()
    assert (root / ".agl/init/edited/agl.yaml").read_bytes() == b"mine\n"


def test_undo_without_an_init_says_so(root: Path) -> None:
    with pytest.raises(ConfigError, match="Nothing to undo"):
        undo(root, root / ".agl")


def test_apply_refuses_a_file_that_changed_since_the_plan(root: Path) -> None:
    (root / "src/a.py").write_bytes(b"other")
    with pytest.raises(ConfigError, match=r"src/a\.py changed while the plan was shown"):
        apply(root, root / ".agl", EDITS)
    assert not (root / "agl.yaml").exists()


def test_the_diff_masks_secrets() -> None:
    edit = Edit("a.py", b'f(api_key="sk-1")\n', b'f(api_key=g or "sk-1")\n', secrets=("sk-1",))
    shown = diff([edit])
    assert '+f(api_key=g or "***")' in shown
    assert "sk-1" not in shown
