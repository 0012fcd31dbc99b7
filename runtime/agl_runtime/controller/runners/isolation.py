"""Separates an agent from agl and from other agents with Linux namespaces: bubblewrap, or util-linux's unshare.

Inside, the project is read-only, agl's state folder is empty but for the attempt's own folders, and no process but the
agent's own exists; when its first process ends, the kernel ends the rest. Control groups, which end processes too, are
out of reach. The agent can undo none of it: it has no capability over the mounts, and as root it keeps only those that
programs need for files of their own, a few devices, and a read-only view of the kernel's settings. The rest of the file
system and the network stay as they are, so what a daemon would do for the user (docker, cron) it does for the agent.

The first process in it is a shell that waits for the agent. On its standard input it says that it begins the agent, and
then how that ended (`exit_code`); the agent itself reads /dev/null. Where nothing arrives, the sandbox never came to
start it; once it has begun, whatever happens in it is the agent's doing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agl_runtime.errors import PreconditionError, RunnerError

Kind = Literal["bubblewrap", "unshare", "none"]
ROOT_CAPABILITIES = ("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "net_bind_service")
ROOT_CAPABILITY_NUMBERS = (0, 1, 3, 4, 5, 6, 7, 10)  # the kernel's, in the same order
ROOT_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SYSRQ = "/proc/sysrq-trigger"
TOOL_PATH = os.pathsep.join(("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"))
PROBE_TIMEOUT_S = 15.0
MASK = "run/mask"
SIGNAL_BASE = 128
LARGEST_CODE = 255
BEGUN = b"begun"
_INIT = """
trap : HUP INT TERM
echo begun >&0
"$@" </dev/null
printf '\\n%s\\n' $? >&0
"""


@dataclass(frozen=True, slots=True)
class View:
    """What an agent sees. All paths are absolute and without symbolic links.

    `hidden` is agl's state folder, of which only `own` (folders in it) stay, writable. `read_only` folders may hold
    `hidden`; `emptied` are files in them that show nothing, and `opened` folders that stay writable. `shown` are
    (source, target) pairs: a file or folder put read-only on an existing one in `own`.
    """

    hidden: Path
    own: tuple[Path, ...]
    read_only: tuple[Path, ...]
    emptied: tuple[Path, ...]
    opened: tuple[Path, ...]
    shown: tuple[tuple[Path, Path], ...]
    cwd: Path


Mount = tuple[str, str, str, str]
"""Source, target, type and options of a mount, in the words of fstab."""

Wrap = Callable[[Sequence[str], View, Path], list[str]]
"""Makes the sandboxed command of a command; the path is a folder for the sandbox's own notes."""


Trial = Callable[[str, View, Path], tuple[int | None, str]]
"""Runs a text of the shell in a sandbox, with a folder for notes; returns its exit code, None when it was never begun,
and what was said on standard error."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """How agents are separated here, or why they are not."""

    kind: Kind
    reason: str = ""
    wrap: Wrap | None = None

    def __str__(self) -> str:
        return f"none: {self.reason}" if self.kind == "none" else self.kind


def choose_isolation(setting: Literal["auto", "required", "off"]) -> Isolation:
    """Raises PreconditionError when it is required and not to be had."""
    if setting == "off":
        return Isolation("none", "agent.isolation is off")
    found = probe_isolation()
    if setting == "required" and found.kind == "none":
        raise PreconditionError(
            f"Agents cannot be isolated here: {found.reason}.", "Install bubblewrap, or set agent.isolation: auto."
        )
    return found


def probe_isolation(kinds: Sequence[Kind] = ("bubblewrap", "unshare")) -> Isolation:
    """The first of `kinds` that really hides a file here; tried by running a command in it. Blocks."""
    if not sys.platform.startswith("linux"):
        return Isolation("none", f"namespaces need Linux, and this is {sys.platform}")
    reasons = []
    for kind in kinds:
        try:
            wrap = _bubblewrap() if kind == "bubblewrap" else _unshare()
            prove(_trial_of(wrap))
        except RunnerError as error:
            reasons.append(f"{kind}: {error.what}")
        else:
            return Isolation(kind, wrap=wrap)
    return Isolation("none", "; ".join(reasons))


def exit_code(report: bytes) -> int | None:
    """The exit code of a sandboxed command, negative for a signal; None when it was never begun. A shell's code for
    signal n is 128 + n. A command that is not told of after its beginning was killed with the sandbox. As root the
    agent may write here too, so the last code counts."""
    begun, *lines = report.split(b"\n")
    if begun != BEGUN:
        return None
    codes = [int(line) for line in lines if len(line) <= len(str(LARGEST_CODE)) and line.isdigit()]
    code = next((code for code in reversed(codes) if code <= LARGEST_CODE), SIGNAL_BASE + signal.SIGKILL)
    return SIGNAL_BASE - code if SIGNAL_BASE < code <= SIGNAL_BASE + signal.NSIG else code


def prove(run: Trial) -> None:
    """Raises RunnerError where the sandbox that `run` makes hides nothing."""
    with tempfile.TemporaryDirectory(prefix="agl-probe-") as name:
        project = Path(name).resolve()
        hidden, own, notes = project / "state", project / "state" / "own", project / "state" / "notes"
        for folder in (own, notes, hidden / MASK):
            folder.mkdir(parents=True)
        (hidden / "secret").touch()
        view = View(hidden, (own,), (project,), (), (), (), own)
        code, said = run(f"test ! -e {hidden}/secret && touch {own}/written && ! touch {project}/written", view, notes)
        if code != 0:
            lines = said.strip().splitlines()
            raise RunnerError(lines[-1] if lines else f"a trial ended with {code}")


def _trial_of(wrap: Wrap) -> Trial:
    def run(checks: str, view: View, notes: Path) -> tuple[int | None, str]:
        command = wrap(["/bin/sh", "-c", f"{{ {checks}; }} 2>/dev/null"], view, notes)
        read_end, write_end = os.pipe()
        try:
            done = subprocess.run(command, stdin=write_end, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunnerError(f"it could not be tried ({error})") from error
        finally:
            os.close(write_end)
            with os.fdopen(read_end, "rb") as status:
                code = exit_code(status.read())
        return code, done.stderr.decode(errors="replace")

    return run


def _tool(name: str) -> str:
    found = shutil.which(name, path=TOOL_PATH)
    if found is None:
        raise RunnerError(f"{name} is not installed")
    return found


def _bubblewrap() -> Wrap:
    program = _tool("bwrap")
    as_root = os.geteuid() == 0

    def wrap(argv: Sequence[str], view: View, notes: Path) -> list[str]:
        words = [program, "--dev-bind", "/", "/", "--ro-bind", "/sys", "/sys"]
        if as_root:
            words += ["--dev", "/dev", "--cap-drop", "ALL"]
            words += [word for name in ROOT_CAPABILITIES for word in ("--cap-add", f"CAP_{name.upper()}")]
        for path in view.read_only:
            words += ["--ro-bind", str(path), str(path)]
        for path in view.emptied:
            words += ["--ro-bind", "/dev/null", str(path)]
        words += _pairs("--bind", view.opened)
        words += ["--tmpfs", str(view.hidden)]
        words += _pairs("--bind", view.own)
        for source, target in view.shown:
            words += ["--ro-bind", str(source), str(target)]
        words += ["--proc", "/proc"]
        if as_root:
            words += ["--ro-bind", "/proc/sys", "/proc/sys"]
            words += ["--ro-bind", "/dev/null", SYSRQ] if os.path.exists(SYSRQ) else []
        words += ["--unshare-pid", "--die-with-parent", "--chdir", str(view.cwd)]
        return [*words, "--as-pid-1", "--", "/bin/sh", "-c", _INIT, "sh", *argv]

    return wrap


def _pairs(option: str, paths: Sequence[Path]) -> list[str]:
    return [word for path in paths for word in (option, str(path), str(path))]


def _unshare() -> Wrap:
    unshare, setpriv, mount = _tool("unshare"), _tool("setpriv"), _tool("mount")
    user, group = os.geteuid(), os.getegid()
    enter = [setpriv, "--pdeathsig", "KILL", unshare, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if user == 0:
        keep = ",".join(["-all", *(f"+{name}" for name in ROOT_CAPABILITIES)])
        leave = [setpriv, "--no-new-privs", "--inh-caps=-all", f"--bounding-set={keep}", "--"]
    else:
        enter += ["--user", "--map-root-user"]
        leave = [unshare, "--user", f"--map-user={user}", f"--map-group={group}", "--"]

    def wrap(argv: Sequence[str], view: View, notes: Path) -> list[str]:
        table = notes / "fstab"
        rows = _first_mounts(view, as_root=user == 0)
        table.write_text("".join(f"{' '.join(map(_escaped, row))} 0 0\n" for row in rows), encoding="utf-8")
        steps = [[mount, "--all", "--fstab", str(table)]]
        for source, target, _, options in _last_mounts(view, as_root=user == 0):
            steps.append([mount, "--options", options, source, target])
        mounts = " && ".join(map(shlex.join, steps))
        refuse = """{ printf '%s\\n' "$said" >&2; exit 1; }"""
        script = f"said=$( {{ {mounts}; }} 2>&1 ) || {refuse}\ncd {shlex.quote(str(view.cwd))} || exit 1\n"
        return [*enter, "--", "/bin/sh", "-c", script + _INIT, "sh", *leave, *argv]

    return wrap


def sandbox_of(view: View) -> dict[str, Any]:
    """The same sandbox for a process that enters it by system calls of its own, as `warm_helper` reads it."""
    as_root = os.geteuid() == 0
    mounts = [*_first_mounts(view, as_root=as_root), *_last_mounts(view, as_root=as_root)]
    return {"mounts": mounts, "capabilities": ROOT_CAPABILITY_NUMBERS if as_root else ()}


def _first_mounts(view: View, *, as_root: bool) -> list[Mount]:
    """Those that one process can make from a table: first the state folder's empty double with the attempt's own
    folders in it, then what stays writable or usable where something goes over it."""
    double = view.hidden / MASK
    rows = [("agl", str(double), "tmpfs", "mode=700,size=1m")]
    for path in view.own:
        rows.append((str(path), str(double / path.relative_to(view.hidden)), "none", "rbind,X-mount.mkdir"))
    for source, target in view.shown:
        place = double / target.relative_to(view.hidden)
        rows.append((str(source), str(place), "none", f"rbind,{_read_only(source)}"))
    rows += [("/dev/null", str(path), "none", "bind") for path in view.emptied]
    rows += [(str(path), str(path), "none", "rbind") for path in view.opened]
    rows += [("agl", path, "tmpfs", "ro") for path in _mounts_in_sys()]
    if as_root:
        rows.append(("agl", "/dev/pts", "devpts", "mode=620,ptmxmode=666"))
        devices = {f"/dev/{name}": f"/dev/{name}" for name in ROOT_DEVICES} | {"/dev/pts/ptmx": "/dev/ptmx"}
        rows += [(source, target, "none", "bind") for source, target in devices.items()]
        rows.append(("/proc/sys", "/proc/sys", "none", "bind,ro"))
        if os.path.exists(SYSRQ):
            rows.append(("/dev/null", SYSRQ, "none", "bind"))
    return rows


def _last_mounts(view: View, *, as_root: bool) -> list[Mount]:
    """Those that go over what the first have made."""
    rows = [(str(path), str(path), "none", f"rbind,{_read_only(path)}") for path in view.read_only]
    rows.append((str(view.hidden / MASK), str(view.hidden), "none", "rbind"))
    if as_root:
        rows += [("/dev", "/dev", "none", "rbind,nodev"), ("/sys", "/sys", "none", "rbind,ro")]
    return rows


def _mounts_in_sys() -> list[str]:
    """The outermost mounts below /sys: control groups, which end processes too, and what looks into the kernel."""
    with open("/proc/self/mountinfo", encoding="utf-8") as table:
        inner = {path for line in table if (path := line.split()[4]).startswith("/sys/")}
    return sorted(path for path in inner if not any(path.startswith(f"{other}/") for other in inner))


def _escaped(word: str) -> str:
    return word.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011").replace("\n", "\\012")


def _read_only(path: Path) -> str:
    """Mount options that make `path` read-only and keep what its file system forbids already: in a user namespace a
    mount may not lose a restriction."""
    flags = os.statvfs(path).f_flag
    names = ("nosuid", "nodev", "noexec", "noatime", "nodiratime", "relatime")
    return ",".join(["ro", *(name for name in names if flags & getattr(os, f"ST_{name.upper()}", 0))])
