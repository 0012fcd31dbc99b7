"""How many agents run at once, on a machine and within a control group."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_runtime.controller.capacity import agents_at_once, available_mb, usable_cores


@pytest.mark.parametrize(
    ("cores", "free_mb", "agent_mb", "agents"),
    [(2, 24_000, 256, 16), (2, 1_000, 256, 2), (0.5, 24_000, 256, 4), (2, 100, 256, 1), (512, 10**7, 16, 256)],
)
def test_the_scarcer_of_cores_and_memory_decides(cores: float, free_mb: float, agent_mb: int, agents: int) -> None:
    assert agents_at_once(cores, free_mb, agent_mb) == agents


def test_a_control_group_of_version_2_narrows_cores_and_memory(tmp_path: Path) -> None:
    inner = tmp_path / "system" / "agl"
    inner.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/system/agl\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("50000 100000\n")
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{100 * 2**20}\n")
    (inner.parent / "memory.current").write_text(f"{30 * 2**20}\n")
    assert usable_cores(tmp_path, tmp_path / "own") == 0.5
    assert available_mb(tmp_path, tmp_path / "own") == 70


def test_control_groups_of_version_1_narrow_them_too(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("3:cpu,cpuacct:/job\n2:memory:/job\n")
    for name, files in {
        "cpu": {"cpu.cfs_quota_us": "25000\n", "cpu.cfs_period_us": "100000\n"},
        "memory": {"memory.limit_in_bytes": f"{64 * 2**20}\n", "memory.usage_in_bytes": f"{4 * 2**20}\n"},
    }.items():
        folder = tmp_path / name / "job"
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    assert usable_cores(tmp_path, tmp_path / "own") == 0.25
    assert available_mb(tmp_path, tmp_path / "own") == 60


def test_without_a_control_group_the_machine_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "none") >= 1
    assert available_mb(tmp_path, tmp_path / "none") > 1
