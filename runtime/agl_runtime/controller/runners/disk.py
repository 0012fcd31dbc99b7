"""The limit of the disk space that one attempt may take, looked at while its agent runs and at its end."""

from __future__ import annotations

import asyncio
import subprocess
import time
from dataclasses import dataclass

from agl_runtime.controller.runners.workspace import AttemptFolder

POLL_S = 1.0
PAUSE_PER_LOOK = 20  # so that looking takes at most a twentieth of a core, however many files there are


@dataclass
class DiskLimit:
    folder: AttemptFolder
    limit_mb: int | None
    is_exceeded: bool = False

    async def look(self) -> None:
        if self.limit_mb is not None and not self.is_exceeded:
            self.is_exceeded = await asyncio.to_thread(used_bytes, self.folder) > self.limit_mb * 2**20

    async def watch(self, exceeded: asyncio.Event) -> None:
        """Set `exceeded` when the limit is. Without a limit it returns at once."""
        while self.limit_mb is not None:
            began = time.monotonic()
            await self.look()
            if self.is_exceeded:
                return exceeded.set()
            await asyncio.sleep(max(POLL_S, PAUSE_PER_LOOK * (time.monotonic() - began)))


def used_bytes(folder: AttemptFolder) -> int:
    """What the files of an attempt take on disk. Blocks; what vanishes meanwhile counts nothing."""
    places = [str(path) for path in (folder.workspace, folder.home, folder.tmp)]
    told = subprocess.run(["du", "-sk", "--", *places], capture_output=True, text=True, check=False).stdout
    return sum(int(line.split(maxsplit=1)[0]) * 1024 for line in told.splitlines())
