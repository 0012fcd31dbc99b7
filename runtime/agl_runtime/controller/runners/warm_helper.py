"""Runs in the user's own interpreter: imports modules once and forks a process for each agent, which then runs the
agent's script or module as this interpreter would have, had it been started for that alone.

Usage: python FLAGS warm_helper.py FD MODULE..., FD being a sequenced-packet socket to the controller. On it:

    when the modules are imported   <- {"loaded": names of top-level modules} or {"refused": a sentence}
    fork, with four descriptors     -> <- {"pid": n} or {"error": a sentence}
    reap N, which has ended         -> <- {"status": n, "cpu_s": s, "rss_kb": n}

The descriptors are standard input (in a sandbox where to report), output, error, and a file that holds the request:
`argv`, `orig_argv`, `env`, `cwd`, and `sandbox` (null, or `mounts` and `capabilities`). Only the forked process reads
it, so no agent's memory holds anything of another's. A sandbox has three processes: one that waits outside, the first
one inside, which tells how the agent ended (as the shell of `isolation` does), and the agent, without its rights.

Standard library only, Python 3.8 or newer, Linux; nothing of agl is imported.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import types
from typing import Any, Iterable, Sequence  # noqa: UP035 - read by Python 3.8 too

MOST_BYTES = 4096
NO_FORK = ("grpc._cython.cygrpc",)  # threads of its own that no fork gets on with
NEWNS, NEWUSER, NEWPID = 0x20000, 0x10000000, 0x20000000
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
LIMITS = {"ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
MOUNT_FLAGS = {**LIMITS, "bind": MS_BIND, "rbind": MS_BIND | MS_REC}
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
CAPABILITY_VERSION = 0x20080522
FLUSH_FAILED = 120
WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
ENV_FIELDS = slice(47, 49)  # of /proc/self/stat after the name: where the environment begins and ends


def has_script_folder() -> bool:
    """Whether this interpreter searches the folder of its script for modules."""
    return not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def refusal(modules: Sequence[str]) -> str | None:
    """Import the modules; why forking would be unsafe after that, or None."""
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # whatever it is, the agent shall meet it by itself
            return f"importing {name} failed: {type(error).__name__}: {error}"
    tasks = len(os.listdir("/proc/self/task"))
    if tasks > 1:
        return f"{tasks} threads run after the imports"
    for name in NO_FORK:
        if name in sys.modules:
            return f"{name} does not survive a fork"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "torch has initialised CUDA"
    return None


def serve(control: socket.socket) -> list[int]:
    """Answer the controller; returns the descriptors of a request, in the forked process alone."""
    room = socket.CMSG_LEN(4 * struct.calcsize("i"))
    while True:
        message, attached, _, _ = control.recvmsg(MOST_BYTES, room, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        if not message:
            os._exit(0)  # the controller is gone
        descriptors = [number for _, _, data in attached for (number,) in struct.iter_unpack("i", data)]
        if descriptors:
            try:
                pid = os.fork()
            except OSError as error:
                answer: dict[str, Any] = {"error": str(error)}
            else:
                if pid == 0:
                    control.close()
                    return descriptors
                answer = {"pid": pid}
            for number in descriptors:
                os.close(number)
        else:
            _, status, usage = os.wait4(int(message), 0)
            answer = {"status": status, "cpu_s": usage.ru_utime + usage.ru_stime, "rss_kb": usage.ru_maxrss}
        control.send(json.dumps(answer).encode())


def take_place(descriptors: list[int], helper: int) -> dict[str, Any]:
    """Become a session of its own with the request's streams, environment and sandbox; returns the request in the
    agent's own process alone."""
    os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with os.fdopen(descriptors[3], "rb") as file:
        request: dict[str, Any] = json.loads(file.read().decode())
    replace_environment(request["env"])
    if request["sandbox"] is not None:
        try:
            enter_sandbox(request["sandbox"], helper)
        except OSError as error:
            os.write(2, f"{error}\n".encode())
            os._exit(1)
    os.chdir(request["cwd"])
    return request


def replace_environment(env: dict[str, str]) -> None:
    """Also where the kernel shows it: by a variable there the processes of an attempt are found. What is too long for
    the place that the helper's own environment left is cut off."""
    os.environ.clear()
    os.environ.update(env)
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[ENV_FIELDS])
    block = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    ctypes.memmove(start, block[: end - start - 1].ljust(end - start, b"\0"), end - start)


def enter_sandbox(sandbox: dict[str, Any], helper: int) -> None:
    """Returns in the agent's process. Raises OSError where nothing was begun."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    call(libc.unshare, NEWNS | NEWPID | (NEWUSER if user else 0))
    if user:
        map_ids(f"0 {user} 1", f"0 {group} 1")
    call(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != helper:
        os._exit(1)
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        os._exit(0)
    call(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    call(libc.mount, b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    call(libc.mount, b"proc", b"/proc", b"proc", sum(MOUNT_FLAGS[name] for name in ("nosuid", "nodev", "noexec")), None)
    for row in sandbox["mounts"]:
        mount(libc, *row)
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # the agent may signal the first process
    agent = os.fork()
    if agent:
        tell_end(agent)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if user:
        call(libc.unshare, NEWUSER)
        map_ids(f"{user} 0 1", f"{group} 0 1")
    give_up_rights(libc, sandbox["capabilities"])
    os.write(0, b"begun\n")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def call(function: Any, *arguments: Any) -> None:
    """A system call. Raises OSError."""
    if function(*(ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments)) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__} failed: {os.strerror(number)}")


def map_ids(users: str, groups: str) -> None:
    for name, text in (("uid_map", users), ("setgroups", "deny"), ("gid_map", groups)):
        with open("/proc/self/" + name, "w") as file:
            file.write(text)


def mount(libc: Any, source: str, target: str, kind: str, options: str) -> None:
    """One line of a table of mounts, as mount(8) would."""
    words = options.split(",")
    flags = sum(MOUNT_FLAGS.get(word, 0) for word in words)
    data = ",".join(word for word in words if word not in MOUNT_FLAGS and not word.startswith("X-"))
    if "X-mount.mkdir" in words:
        os.makedirs(target, exist_ok=True)
    call(libc.mount, os.fsencode(source), os.fsencode(target), kind.encode(), flags, data.encode())
    if flags & MS_BIND and flags & ~(MS_BIND | MS_REC):
        call(libc.mount, None, os.fsencode(target), None, MS_REMOUNT | (flags & ~MS_REC), None)


def give_up_rights(libc: Any, keep: Sequence[int]) -> None:
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for number in set(range(last + 1)) - set(keep):
        call(libc.prctl, PR_CAPBSET_DROP, number, 0, 0, 0)
    kept = sum(1 << number for number in keep)
    call(libc.capset, struct.pack("Ii", CAPABILITY_VERSION, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0))


def tell_end(agent: int) -> None:
    """Wait for the agent and for what it leaves to the first process, say how it ended, and end all of them."""
    pid, status = os.wait()
    while pid != agent:
        pid, status = os.wait()
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    os.write(0, f"\n{code}\n".encode())
    os._exit(0)


def renew() -> None:
    """What modules remember of the process that imported them. (`random` renews itself.)"""
    modules = sys.modules
    if "tempfile" in modules:
        modules["tempfile"].tempdir = None  # type: ignore[attr-defined]
    if "multiprocessing.process" in modules:
        process = modules["multiprocessing.process"]
        process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
        process.current_process().authkey = os.urandom(32)
    if "numpy.random" in modules:
        modules["numpy.random"].seed()


def run(argv: list[str], orig_argv: list[str]) -> int:
    """The script, or the module after -m, as the program's main module; returns its exit code, or a signal's negative
    number."""
    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    sys.argv = argv
    if hasattr(sys, "orig_argv"):
        sys.orig_argv = orig_argv
    is_module = argv[0] == "-m"
    if has_script_folder():
        sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.realpath(argv[0])))
    try:
        if is_module:
            name = argv.pop(1)
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        else:
            path = os.path.join(os.getcwd(), argv[0]) if sys.version_info >= (3, 9) else argv[0]
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            vars(main).update(__file__=path, __cached__=None, __loader__=loader)
            exec(compile(read_script(path), path, "exec", dont_inherit=True), vars(main))
    except SystemExit as error:
        return exit_code(error.code)
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # without this function
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def read_script(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        sys.stderr.write("{}: can't open file {!r}: [Errno {}] {}\n".format(sys.executable, path, *error.args))
        sys.exit(2)


def exit_code(value: object) -> int:
    """What sys.exit(value) means."""
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1


def leave(code: int, imported: frozenset[str]) -> None:
    """End as the interpreter would, but let stand what the helper has imported: to take that apart is to copy it."""
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):  # told by Python already
            step()
    if failures := flush((sys.stdout, sys.stderr)):
        os.write(2, "".join(failures).encode())
        code = FLUSH_FAILED
    for name in {"__main__", *sys.modules} - imported:
        sys.modules.pop(name, None)
    gc.collect()
    flush(each for each in gc.get_objects() if issubclass(type(each), WRITERS))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def flush(streams: Iterable[Any]) -> list[str]:
    """What is to be said of those that cannot be flushed."""
    failures = []
    for stream in streams:
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError) as error:
            failures.append(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
    return failures


def main() -> None:
    if has_script_folder():
        del sys.path[0]  # this file's folder is no place to import from
    control = socket.socket(fileno=int(sys.argv[1]))
    reason = refusal(sys.argv[2:])
    imported = frozenset(sys.modules) - {"__main__"}
    loaded = sorted({name.partition(".")[0] for name in imported})
    control.send(json.dumps({"refused": reason} if reason else {"loaded": loaded}).encode())
    if reason:
        return
    flush((sys.stdout, sys.stderr))
    gc.collect()
    gc.freeze()  # so that an agent's collector does not copy what all of them share
    helper = os.getpid()
    request = take_place(serve(control), helper)
    renew()
    leave(run(request["argv"], request["orig_argv"]), imported)


if __name__ == "__main__":
    main()
