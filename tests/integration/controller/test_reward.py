"""Reward functions of users, in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.controller.reward import Reward, RewardFunction, check_reward
from agl_runtime.controller.runners.base import Kept
from agl_runtime.errors import RewardError
from fakes.agents import PYTHON, make_project, processes_with
from fakes.environments import PYENV
from fakes.runner import ran

SETTINGS = {"function": "reward.py:reward", "python": PYTHON}


def function_of(tmp_path: Path, source: str, environ: dict[str, str] | None = None, **reward: Any) -> RewardFunction:
    project = make_project(tmp_path, {"reward.py": source}, reward={**SETTINGS, **reward})
    return RewardFunction(project, environ={**os.environ, **(environ or {})})


async def reward_of(tmp_path: Path, source: str, task: Any = None, **settings: Any) -> Reward:
    run = replace(ran(3, stdout="out"), stderr=Kept("err", 3), workspace=tmp_path)
    return await function_of(tmp_path, source, **settings).score(task, run, [{"event_type": "agent_exit", "data": {}}])


async def refusal(tmp_path: Path, source: str, **settings: Any) -> str:
    with pytest.raises(RewardError) as caught:
        await reward_of(tmp_path, source, **settings)
    assert caught.value.fix == "Correct it; `agl doctor` checks it."
    return caught.value.what.removeprefix("The reward function reward.py:reward: ")


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("return 0.25", Reward(0.25, {})),
        ("return True", Reward(1.0, {})),
        ("return -3", Reward(-3.0, {})),
        ("return {'reward': 1, 'style': 0.5, 'ok': False}", Reward(1.0, {"style": 0.5, "ok": 0.0})),
        ("import numpy; return numpy.float32(0.5)", Reward(0.5, {})),
        ("import numpy; return numpy.all([True])", Reward(1.0, {})),
    ],
)
async def test_a_number_or_a_mapping_with_parts_is_a_reward(tmp_path: Path, body: str, reward: Reward) -> None:
    assert await reward_of(tmp_path, f"def reward():\n    {body}\n") == reward


async def test_an_asynchronous_function_is_awaited(tmp_path: Path) -> None:
    source = "import asyncio\nasync def reward(task):\n    await asyncio.sleep(0)\n    return task['n']\n"
    assert (await reward_of(tmp_path, source, {"n": 0.75})).value == 0.75


async def test_everything_offered_arrives_by_name(tmp_path: Path) -> None:
    source = """
import json
def reward(events, output, exit, workspace, task, extra=None, **more):
    seen = [events, output.stdout, output["stderr"], exit.code, exit["signal"], exit.timed_out, workspace, task.a.b]
    open("seen.json", "w").write(json.dumps(seen))
    return 1
"""
    await reward_of(tmp_path, source, {"a": {"b": "é"}})
    assert json.loads((tmp_path / "seen.json").read_text()) == [
        [{"event_type": "agent_exit", "data": {}}],
        *("out", "err", 3, None, False, str(tmp_path), "é"),
    ]


async def test_it_runs_in_the_project_beside_its_own_modules_without_agls_key(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 0.5\n")
    source = """
import helper, os, sys
def reward():
    assert not [name for name in os.environ if name.startswith("AGL_") and name != "AGL_TREE"]
    assert "PYTHONPATH" not in os.environ
    assert os.environ["JUDGE_KEY"] == "kept"
    assert "agl_runtime" not in sys.modules
    assert os.getcwd() == os.path.dirname(os.path.abspath(__file__))
    return helper.VALUE
"""
    environ = {"AGL_KEY": "secret", "AGL_CFG_MODEL__API_KEY": "secret", "PYTHONPATH": "/agl", "JUDGE_KEY": "kept"}
    assert (await reward_of(tmp_path, source, environ=environ)).value == 0.5


async def test_what_it_prints_disturbs_nothing(tmp_path: Path) -> None:
    source = "import os\nprint('{')\nos.write(1, b'x' * 2**20)\ndef reward():\n    print('}')\n    return 1\n"
    assert (await reward_of(tmp_path, source)).value == 1.0


async def test_a_long_output_reaches_it(tmp_path: Path) -> None:
    run = ran(stdout="x" * 2**20)
    function = function_of(tmp_path, "def reward(output):\n    return len(output.stdout)\n")
    assert (await function.score(None, run, [])).value == 2**20


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def reward():\n    raise ValueError('bad')", "it raised ValueError: bad."),
        ("def reward(:", "SyntaxError: invalid syntax"),
        ("import no_such_module", "it raised ModuleNotFoundError: No module named 'no_such_module'."),
        ("def other(): pass", "the file defines no function `reward`."),
        ("reward = 1.0", "the file defines no function `reward`."),
        ("def reward(): return None", "its result is NoneType, not a number."),
        ("def reward(): return '1.0'", "its result is str, not a number."),
        ("def reward(): return float('nan')", "its result is nan, not a usable number: finite, and at most 1e+100."),
        ("def reward(): return {'reward': float('inf')}", "`reward` is inf, not a usable number"),
        ("def reward(): return -1e101", "its result is -1e+101, not a usable number"),
        ("def reward(): raise ValueError('half \\ud800')", "it raised ValueError: half \\ud800."),
        ("def reward(): return {'style': 1}", "its mapping has no `reward`."),
        ("def reward(): return {'reward': 1, 'style': 'x'}", "`style` is str, not a number."),
        (
            "def reward(answer): return 1",
            "it asks for `answer`; agl passes task, workspace, exit, output, events by name.",
        ),
        ("def reward(task, /): return 1", "it asks for `task`; agl passes"),
        ("import os\ndef reward(): os._exit(4)", "its process ended without an answer: exit code 4."),
        ("import sys\ndef reward(): sys.exit('enough')", "its process ended without an answer: enough"),
        ("import os\ndef reward(): os.kill(os.getpid(), 9)", "its process ended without an answer: signal 9."),
    ],
)
async def test_whatever_goes_wrong_is_one_sentence_and_never_a_zero(tmp_path: Path, source: str, problem: str) -> None:
    assert problem in await refusal(tmp_path, source)


@pytest.mark.parametrize(
    "answer", ['"text"', "NaN", "[]", "[[1, 2]]", "{}", '{"reward": "1", "parts": {}}', '{"reward": NaN, "parts": {}}',
               '{"reward": 1, "parts": []}', '{"reward": 1, "parts": {"a": null}}', "[" * 100_000, "1" + "0" * 400]
)  # fmt: skip
async def test_an_answer_that_the_function_wrote_itself_must_have_the_shape_too(tmp_path: Path, answer: str) -> None:
    source = f"import os, sys\nopen(sys.argv[2], 'w').write({answer!r})\nsys.stdout.flush()\nos._exit(0)\n"
    assert "its process ended with" in await refusal(tmp_path, source)
    with pytest.raises(RewardError, match="its process ended with"):
        await function_of(tmp_path, source).check()


async def test_the_name_of_a_part_can_be_sent_whatever_it_holds(tmp_path: Path) -> None:
    source = "def reward(): return {'reward': 1e100, 'half \\ud800': 1}"
    assert await reward_of(tmp_path, source) == Reward(1e100, {"half \\ud800": 1.0})


async def test_it_has_a_time_limit_and_leaves_nothing_running(tmp_path: Path) -> None:
    mark = f"reward-{os.getpid()}"
    source = f"""
import subprocess, sys, time
def reward():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "{mark}"], start_new_session=True)
    time.sleep(600)
"""
    assert await refusal(tmp_path, source, timeout_s=1.0) == "it did not answer within 1 s."
    assert processes_with(mark) == []
    assert list((tmp_path / ".agl").glob("reward-*")) == []


def test_a_check_imports_the_file_and_calls_nothing(tmp_path: Path) -> None:
    source = "def reward(task, output):\n    raise ValueError('called')\n"
    check_reward(make_project(tmp_path, {"reward.py": source}, reward=SETTINGS))
    with pytest.raises(RewardError, match="defines no function `reward`"):
        check_reward(make_project(tmp_path, {"reward.py": ""}, reward=SETTINGS))


async def test_a_check_tells_whether_events_are_asked_for(tmp_path: Path) -> None:
    for source, wanted in (
        ("def reward(task): ...", False),
        ("def reward(events): ...", True),
        ("def reward(**all): ...", True),
    ):
        function = function_of(tmp_path, source)
        await function.check()
        assert function.wants_events is wanted


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"function": "reward.py"}, "`reward.py` is not file.py:name"),
        ({"function": "reward.py:"}, "is not file.py:name"),
        ({"function": "absent.py:reward"}, "absent.py does not exist"),
        ({"python": "no-such-python"}, "no interpreter `no-such-python` was found"),
        ({"python": "./env/bin/python"}, "no interpreter `./env/bin/python` was found"),
    ],
)
def test_a_function_that_is_not_there_is_told_at_once(tmp_path: Path, settings: dict[str, str], problem: str) -> None:
    with pytest.raises(RewardError) as caught:
        function_of(tmp_path, "", **settings)
    assert problem in str(caught.value)


async def test_the_first_python3_of_the_users_path_is_used(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@" 2>/dev/null\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    found = function_of(tmp_path, "def reward(): return 1\n", {"PATH": path}, python=None)
    assert (await found.score(None, ran(), [])).value == 1.0


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.13"])
async def test_interpreters_from_3_8_on_can_run_it(tmp_path: Path, version: str) -> None:
    installed = sorted(PYENV.glob(f"{version}.*/bin/python")) if PYENV.exists() else []
    python = installed[-1] if installed else shutil.which(f"python{version}")
    if python is None:
        pytest.skip(f"no Python {version} here")
    source = "async def reward(task):\n    return {'reward': task['n'], 'part': 1}\n"
    assert await reward_of(tmp_path, source, {"n": 2}, python=str(python)) == Reward(2.0, {"part": 1.0})
