from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agl_runtime.errors import PreconditionError
from agl_runtime.part import KEY_FILE, admin_key


def test_the_key_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    made = admin_key(tmp_path / ".agl")
    assert admin_key(tmp_path / ".agl") == made
    assert (tmp_path / ".agl/.gitignore").read_text() == "*\n", "git never sees the key"
    assert (tmp_path / ".agl" / KEY_FILE).stat().st_mode & 0o777 == 0o600


def test_a_full_disk_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / f"{KEY_FILE}.{os.getpid()}").symlink_to("/dev/full")
    message = rf"^{tmp_path} cannot be written: No space left on device\. Make it writable for you, with free disk"
    with pytest.raises(PreconditionError, match=message):
        admin_key(tmp_path)


def test_a_part_may_open_as_many_files_as_hundreds_of_agents_take(tmp_path: Path) -> None:
    (tmp_path / "agl.yaml").write_text("agent: {command: 'true'}\n")
    code = f"""
import resource
from agl_runtime.part import begin

files = resource.RLIMIT_NOFILE
hard = resource.getrlimit(files)[1]
resource.setrlimit(files, (256, hard))
begin("x", ["--root", {str(tmp_path)!r}])
print(resource.getrlimit(files) == (min(hard, 2**16), hard))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"
