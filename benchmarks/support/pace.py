"""How fast a controller brings rollouts to their end, and what one of them costs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from support.servers import Server, process, send

POLL_S = 0.02
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Pace:
    """`cpu_ms` is what one rollout cost the gateway, the controller and its agents together."""

    per_s: float
    cpu_ms: float


def timed(server: Server, command: Sequence[str], folder: Path, says: str, rollouts: int) -> Pace:
    """From the line of its log in which the controller `says` that it begins, to the end of the last rollout."""
    path = os.environ.get("PYTHONPATH", "") if server.scoped else str(folder)
    with process(command, folder, PYTHONPATH=path) as child:
        give_up_at = time.monotonic() + LIMIT_S

        def wait(is_over: Any) -> float:
            while not is_over():
                if child.poll() is not None or time.monotonic() > give_up_at:
                    raise SystemExit("\n".join(log.read_text()[-2000:] for log in folder.glob("*.log")))
                time.sleep(POLL_S)
            return time.monotonic()

        def cpu_s() -> float:
            controller = psutil.Process(child.pid)  # its helper of warm starts lives on, with its children's time
            return sum(sum(each.cpu_times()[:4]) for each in (controller, *controller.children())) + server.cpu_s()

        began = wait(lambda: any(says in log.read_text(errors="replace") for log in folder.glob("*.log")))
        before_s = cpu_s()
        ended = wait(lambda: ended_rollouts(server) >= rollouts)
        cpu_ms = (cpu_s() - before_s) * 1000 / rollouts
    page = send("GET", f"{server.url}/api/rollouts/terminal?after=0&limit={rollouts}", server.key)
    states = {item["state"] for item in page["items"]}
    if states != {"succeeded"}:
        raise SystemExit(f"{server.name}: rollouts ended as {json.dumps(sorted(states))}.")
    return Pace(rollouts / (ended - began), cpu_ms)


def ended_rollouts(server: Server) -> int:
    page = send("GET", f"{server.url}/api/rollouts/terminal?after=0&limit=1", server.key)
    return int(page["total_terminal"])
