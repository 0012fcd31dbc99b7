"""An agent that is forked from a warm helper cannot be told from one whose interpreter was started for it."""

from __future__ import annotations

import ast
import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agl_runtime.controller.runners.base import AgentRun
from fakes.agents import PYTHON, Way, make_project, run_agent, running
from fakes.claims import granted
from fakes.environments import PYENV

STARTS: tuple[Way, ...] = ("none", "bubblewrap", "warm", "warm sandbox")
OTHERS = [path for path in sorted(PYENV.glob("3.*/bin/python")) if int(path.parent.parent.name.split(".")[1]) >= 8]
each_start = pytest.mark.parametrize("way", STARTS)

FACTS = """
import inspect, os, pickle, signal, sys

class Thing: pass

print(repr({
    "name": __name__, "file": __file__, "doc": __doc__, "package": __package__, "spec": getattr(__spec__, "name", None),
    "cached": __cached__, "loader": type(__loader__).__name__, "builtins": __builtins__.__name__,
    "argv": sys.argv, "orig_argv": getattr(sys, "orig_argv", None), "path0": sys.path[0], "executable": sys.executable,
    "prefix": sys.prefix, "main": sorted(n for n in vars(sys.modules["__main__"]) if n != "Thing"),
    "source": inspect.getsource(Thing), "pickled": pickle.loads(pickle.dumps(Thing())).__class__ is Thing,
    "flags": tuple(sys.flags), "warnoptions": sys.warnoptions, "xoptions": dict(sys._xoptions),
    "encodings": [(each.encoding, each.errors, each.line_buffering) for each in (sys.stdin, sys.stdout, sys.stderr)],
    "stdin": sys.stdin.read(), "cwd": os.getcwd(), "env": dict(os.environ), "umask": os.umask(0),
    "leader": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(), "uid": os.getresuid(),
    "open": [n for n in os.listdir("/proc/self/fd") if int(n) > 2 and os.path.exists(f"/proc/self/fd/{n}")],
    "ignored": sorted(int(n) for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "shown": b"AGL_TREE=" in open("/proc/self/environ", "rb").read(),
}))
"""


async def output(tmp_path: Path, way: Way, code: str, *, command: list[str] | None = None, **kw: Any) -> AgentRun:
    agent = {"command": command or [PYTHON, "agent.py"], **kw}
    files: Mapping[str, str] = {"agent.py": code, "lib/__init__.py": "", "lib/tool.py": code}
    return await run_agent(make_project(tmp_path / "p", files, agent=agent), way)


@pytest.mark.parametrize("isolation", [("none", "warm"), ("bubblewrap", "warm sandbox")])
@pytest.mark.parametrize(
    "words",
    [
        ["agent.py", "-x", "--say=a \"b\" 'c'", "é\n"],
        ["-u", "-B", "-W", "error::UserWarning", "-Xdev", "-O", "./agent.py"],
        ["-Is", "agent.py"],
        ["-m", "lib.tool", "-m", "x"],
        ["lib/tool.py", "a" * 100_000, "b" * 100_000],
    ],
    ids=["arguments", "options", "isolated", "module", "long"],
)
async def test_the_program_finds_itself_in_the_same_place(
    tmp_path: Path, isolation: tuple[Way, Way], words: list[str]
) -> None:
    env = {"STATIC": "é", "LATER": "{q}"}
    runs = [await output(tmp_path, way, FACTS, command=[PYTHON, *words], env=env) for way in isolation]
    assert runs[0].exit.ok, runs[0].stderr.text
    cold, warm = (ast.literal_eval(run.stdout.text) for run in runs)
    cold["env"].pop("PWD", None)  # from the sandbox's shell
    assert warm == cold
    assert runs[1].stderr == runs[0].stderr


@pytest.mark.parametrize("python", OTHERS, ids=lambda python: python.parent.parent.name)
async def test_every_python_of_this_machine_can_be_forked(tmp_path: Path, python: Path) -> None:
    command = [str(python), "-Xdev", "agent.py", "-x"]
    cold, warm = [await output(tmp_path, way, FACTS, command=command) for way in ("none", "warm")]
    assert cold.exit.ok, cold.stderr.text
    assert ast.literal_eval(warm.stdout.text) == ast.literal_eval(cold.stdout.text)
    assert warm.stderr == cold.stderr


class Ending(NamedTuple):
    """A script (None: there is none), how it ends, and what it says; of standard error only the end."""

    code: str | None
    exit_code: int | None
    signal: int | None
    stdout: str
    stderr: str


ENDINGS = {
    "code": Ending("sys.exit(7)", 7, None, "", ""),
    "sentence": Ending("sys.exit('why not')", 1, None, "", "why not\n"),
    "nothing": Ending("sys.exit()", 0, None, "", ""),
    "raised": Ending(
        "def inner():\n    raise ValueError('no') from OSError(3, 'so')\ninner()",
        1,
        None,
        "",
        "raise ValueError('no') from OSError(3, 'so')\nValueError: no\n",
    ),
    "syntax": Ending("def (:", 1, None, "", "SyntaxError: invalid syntax\n"),
    "hook": Ending(
        "import traceback\n"
        "sys.excepthook = lambda *it: print('hooked', it[0].__name__, len(traceback.extract_tb(it[2])))\n1/0",
        1,
        None,
        "hooked ZeroDivisionError 1\n",
        "",
    ),
    "signal": Ending("os.kill(os.getpid(), signal.SIGTERM)", None, signal.SIGTERM, "", ""),
    "interrupt": Ending("os.kill(os.getpid(), signal.SIGINT)", None, signal.SIGINT, "", "KeyboardInterrupt\n"),
    "kill": Ending("os.kill(os.getpid(), signal.SIGKILL)", None, signal.SIGKILL, "", ""),
    "abrupt": Ending("sys.stdout.flush(); os._exit(9)", 9, None, "", ""),
    "at exit": Ending(
        "import atexit\natexit.register(print, 'goodbye')\nprint('buffered', end='')", 0, None, "bufferedgoodbye\n", ""
    ),
    "thread": Ending(
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.05), print('later'))).start()",
        0,
        None,
        "later\n",
        "",
    ),
    "unclosed": Ending("file = open('made', 'w')\nfile.write('x')\nprint('begun')", 0, None, "begun\n", ""),
    "kept file": Ending("import json\njson.kept = open('made', 'w')\njson.kept.write('x')", 0, None, "", ""),
    "deleted": Ending(
        "class Thing:\n    def __del__(self): print('gone', Thing is not None)\n"
        "one, two = Thing(), Thing()\none.other, two.other = two, one\nthree = Thing()\nimport atexit\n"
        "atexit.register(print, 'first')",
        0,
        None,
        "first\n" + "gone True\n" * 3,
        "",
    ),
    "generator": Ending(
        "def numbers():\n    try:\n        yield 1\n    finally:\n        print('closed')\nit = numbers()\nnext(it)",
        0,
        None,
        "closed\n",
        "",
    ),
    "exit in thread": Ending(
        "import threading\nthreading.Thread(target=sys.exit, args=(3,)).start()\nsys.exit(True)", 1, None, "", ""
    ),
    "bad hooks": Ending(
        "import atexit\natexit.register(lambda: 1 / 0)\natexit.register(print, 'still')",
        0,
        None,
        "still\n",
        "ZeroDivisionError: division by zero\n",
    ),
    "fork": Ending(
        "if os.fork() == 0:\n    print('child')\n    sys.exit(5)\nprint(os.WEXITSTATUS(os.wait()[1]))",
        0,
        None,
        "child\n5\n",
        "",
    ),
    "closed stream": Ending("sys.stdout.close()", 0, None, "", ""),
    "full": Ending(
        "sys.stdout = open('/dev/full', 'w')\nprint('lost')",
        120,
        None,
        "",
        "OSError: [Errno 28] No space left on device\n",
    ),
    "warning": Ending(
        "import warnings\nwarnings.warn('careful')\nwarnings.warn('old', DeprecationWarning)",
        0,
        None,
        "",
        "DeprecationWarning: old\n  warnings.warn('old', DeprecationWarning)\n",
    ),
    "missing": Ending(
        None, 2, None, "", "can't open file 'WORKSPACE/absent.py': [Errno 2] No such file or directory\n"
    ),
    "multiprocessing": Ending(
        "import multiprocessing\ndef twice(n): return 2 * n\nif __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(twice, [1, 2]))",
        0,
        None,
        "[2, 4]\n",
        "",
    ),
}


@each_start
@pytest.mark.parametrize("name", ENDINGS)
async def test_an_end_is_judged_and_told_the_same(tmp_path: Path, way: Way, name: str) -> None:
    ending = ENDINGS[name]
    command = [PYTHON, "agent.py" if ending.code is not None else "absent.py"]
    run = await output(tmp_path, way, f"import os, signal, sys\n{ending.code}\n", command=command)
    assert (run.exit.exit_code, run.exit.signal) == (ending.exit_code, ending.signal), run.stderr.text
    assert run.stdout.text == ending.stdout
    said = run.stderr.text.replace(str(run.workspace), "WORKSPACE")
    assert (
        said.endswith(ending.stderr) if ending.stderr else said in ("", "Terminated\n", "Killed\n")
    )  # the sandbox's shell says so
    assert "warm_helper" not in said
    assert said.count("Traceback") == {"raised": 1, "interrupt": 1, "bad hooks": 1}.get(name, 0)
    assert name not in ("unclosed", "kept file") or (run.workspace / "made").read_text() == "x"


@each_start
async def test_chance_differs_from_one_agent_to_the_next(tmp_path: Path, way: Way) -> None:
    code = """
import multiprocessing, os, random, tempfile, uuid
print(random.random(), uuid.uuid4(), os.urandom(8), bytes(multiprocessing.current_process().authkey))
print(tempfile.gettempdir() == os.environ["TMPDIR"])
"""
    project = make_project(tmp_path, {"agent.py": code}, agent={"warm": ["random", "uuid", "multiprocessing"]})
    project = project if way.startswith("warm") else make_project(tmp_path, {"agent.py": code})
    async with running(project, way) as runner:
        runs = [await runner.run(granted(name), asyncio.Event()) for name in ("r1", "r2")]
    lines = [run.stdout.text.splitlines() for run in runs]
    assert [line[1] for line in lines] == ["True", "True"], runs[0].stderr.text
    assert not set(lines[0][0].split()) & set(lines[1][0].split())


@each_start
async def test_agents_run_side_by_side(tmp_path: Path, way: Way) -> None:
    code = "import os, sys\nprint(sys.argv[1], os.environ['AGL_ROLLOUT_ID'])\nsys.exit(int(sys.argv[1]))\n"
    project = make_project(tmp_path, {"agent.py": code}, agent={"command": [PYTHON, "agent.py", "{n}"]})
    async with running(project, way) as runner:
        grants = [granted(f"r{number}", {"n": number}) for number in range(12)]
        runs = await asyncio.gather(*(runner.run(grant, asyncio.Event()) for grant in grants))
    assert [run.exit.exit_code for run in runs] == list(range(12))
    assert [run.stdout.text for run in runs] == [f"{number} r{number}\n" for number in range(12)]


@pytest.mark.parametrize("way", ["warm", "warm sandbox"])
async def test_nothing_of_one_agent_is_in_the_memory_of_another(tmp_path: Path, way: Way) -> None:
    """Neither what it was given nor what it did to modules that both use."""
    code = """
import json, os, sys
import colorsys
print(hasattr(colorsys, "mark"))
colorsys.mark = True
secret = bytes(reversed(b"51-terces-tneicna"))
if sys.argv[1] != secret.decode():
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            if "rw" in line.split()[1]:
                memory.seek(start)
                print(memory.read(end - start).count(secret) > 1, end=" ")
"""
    agent = {"command": [PYTHON, "agent.py", "{n}"], "warm": ["colorsys"]}
    project = make_project(tmp_path, {"agent.py": code}, agent=agent)
    async with running(project, way) as runner:
        first = await runner.run(granted("r1", {"n": "ancient-secret-15"}), asyncio.Event())
        second = await runner.run(granted("r2", {"n": "other"}), asyncio.Event())
    assert first.stdout.text == "False\n", first.stderr.text
    assert second.exit.ok, second.stderr.text
    assert second.stdout.text.startswith("False\n")
    assert "True" not in second.stdout.text


@pytest.mark.parametrize("way", ["warm", "warm sandbox"])
async def test_an_agent_has_nothing_of_its_helper_open(tmp_path: Path, way: Way) -> None:
    code = """
import os
here = "/proc/self/fd"
print(sorted(os.readlink(f"{here}/{n}").split(":")[0] for n in os.listdir(here) if os.path.exists(f"{here}/{n}")))
print(os.getppid())
"""
    async with running(make_project(tmp_path, {"agent.py": code}), way) as runner:
        run = await runner.run(granted(), asyncio.Event())
        opened, parent = run.stdout.text.splitlines()
        assert opened == "['/dev/null', 'pipe', 'pipe']"
        if way == "warm":
            assert b"agent-key" not in Path(f"/proc/{parent}/environ").read_bytes()
        else:
            assert parent == "1"
