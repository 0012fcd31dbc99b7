"""Shows that an agent's model calls go to the gateway and nowhere else: the rollout runs with the network cut off.

The command replaces itself by the same command in a new network namespace (Linux; as root or in a user namespace),
where only loopback exists. There everything still works that talks to the gateway, and the kernel counts what tried to
go elsewhere: sends and connects for which there is no route.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from agl_runtime.errors import PreconditionError

VARIABLE = "AGL_CLI_CUT_OFF"
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
NOWHERE = ("192.0.2.1", 443)  # an address for documentation (RFC 5737), which no route may lead to
OWN_LOOKS = 1
PROC = Path("/proc/self/net")


@dataclass(frozen=True, slots=True)
class Proof:
    """`interfaces` are those of the namespace, `refused` counts what tried to go elsewhere in it."""

    interfaces: list[str]
    refused: int

    def __str__(self) -> str:
        tried = "nothing tried to go" if not self.refused else f"{self.refused} sends tried to go, in vain,"
        return f"network: only {', '.join(self.interfaces)} was there; {tried} anywhere else"


def is_cut_off() -> bool:
    """Whether this process was started by `cut_off`."""
    return os.environ.get(VARIABLE) == "1"


def cut_off(arguments: Sequence[str]) -> NoReturn:
    """Become `agl ARGUMENTS` in a network namespace of its own. Raises PreconditionError where that is not allowed."""
    unshare = shutil.which("unshare") if sys.platform.startswith("linux") else None
    if unshare is None:
        raise PreconditionError("--prove needs Linux and util-linux's unshare.", "Run it on such a machine.")
    enter = [unshare, "--net", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--"]
    trial = subprocess.run([*enter, "true"], capture_output=True, text=True, check=False)
    if trial.returncode != 0:
        raise PreconditionError(
            f"This system allows no network namespace here ({trial.stderr.strip() or trial.returncode}).",
            "Run it as root, or where unprivileged user namespaces are allowed.",
        )
    sys.stdout.flush()
    sys.stderr.flush()
    command = [*enter, sys.executable, "-m", "agl_cli.main", *arguments]
    os.execve(unshare, command, {**os.environ, VARIABLE: "1"})


def raise_loopback() -> None:
    """Bring loopback up and make sure that there is nothing else. Raises PreconditionError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
    others = [name for name in interfaces() if name != "lo"]
    if others or _has_route(NOWHERE):
        raise PreconditionError(
            f"The network is not cut off: {', '.join(others) or 'a route'} leads out.", "Report it."
        )


def interfaces() -> list[str]:
    return [line.split(":")[0].strip() for line in (PROC / "dev").read_text().splitlines() if ":" in line]


def refused_sends() -> int:
    """How often anything in this namespace tried to reach an address without a route, but for our own look."""
    lines = [line.split() for line in (PROC / "snmp").read_text().splitlines() if line.startswith("Ip:")]
    count = int(dict(zip(*lines, strict=True))["OutNoRoutes"])
    six = PROC / "snmp6"  # missing where the kernel has no IPv6
    rows = dict(line.split() for line in six.read_text().splitlines()) if six.exists() else {}
    return count + int(rows.get("Ip6OutNoRoutes", 0)) - OWN_LOOKS


def _has_route(address: tuple[str, int]) -> bool:
    """Nothing is sent: connecting a datagram socket only looks for a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        return handle.connect_ex(address) != errno.ENETUNREACH
