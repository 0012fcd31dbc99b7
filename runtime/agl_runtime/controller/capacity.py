"""How many agents run at once where the configuration does not say: from the cores and the memory of this machine, or
of the control group that this process lives in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

AGENTS_PER_CORE = 8  # an agent waits for its model most of the time
MEMORY_SHARE = 0.7
MOST_AGENTS = 256
CGROUP_ROOT = Path("/sys/fs/cgroup")
MIB = 2**20


def agents_at_once(cores: float, available_mb: float, agent_mb: int) -> int:
    by_memory = int(available_mb * MEMORY_SHARE / agent_mb)
    return max(1, min(int(cores * AGENTS_PER_CORE), by_memory, MOST_AGENTS))


def usable_cores(root: Path = CGROUP_ROOT, own: Path = Path("/proc/self/cgroup")) -> float:
    """Cores that this process may use: its affinity, or less where a control group gives it a smaller share."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    for folder in _groups(root, own, "cpu"):
        quota, period = _numbers(folder / "cpu.max") or (0, 0)
        if not period:
            quota = next(iter(_numbers(folder / "cpu.cfs_quota_us")), 0)
            period = next(iter(_numbers(folder / "cpu.cfs_period_us")), 0)
        if quota > 0 and period > 0:
            cores = min(cores, quota / period)
    return cores


def available_mb(root: Path = CGROUP_ROOT, own: Path = Path("/proc/self/cgroup")) -> float:
    """Memory in MiB that is free now, on the machine and in every control group around this process."""
    free = float(psutil.virtual_memory().available)
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for folder in _groups(root, own, "memory"):
        for limit_name, used_name in names:
            limit, used = _numbers(folder / limit_name), _numbers(folder / used_name)
            if limit and used:
                free = min(free, max(0.0, limit[0] - used[0]))
    return free / MIB


def _groups(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those around it, of version 2 and of version 1."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        top = root / controller if names else root
        inner = Path(path.lstrip("/"))
        yield from (top / part for part in (inner, *inner.parents))


def _numbers(file: Path) -> list[int]:
    """The whole numbers in a file; none when it is missing or says "max"."""
    try:
        words = file.read_text(encoding="utf-8").split()
    except OSError:
        return []
    return [int(word) for word in words] if all(word.lstrip("-").isdigit() for word in words) else []
