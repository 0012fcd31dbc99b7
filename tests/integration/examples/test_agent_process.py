"""The example agent as its owner runs it, against a model server over real HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fakes.model_server import Answer, FakeModelServer, tool_call

AGENT = Path(__file__).parents[3] / "examples" / "calculator" / "agent.py"


def run(answers: Sequence[Answer]) -> tuple[list[str], FakeModelServer]:
    """The lines that the agent printed, and the server it asked."""
    with FakeModelServer(answers) as server:
        env = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "test"}
        command = [sys.executable, str(AGENT), "What is 47 times 83?"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines(), server


def test_it_calls_its_tool_and_prints_the_answer_last() -> None:
    call = tool_call("calculator", {"expression": "47*83"})
    lines, server = run([Answer(text="", tool_calls=[call]), Answer("The answer is 3901.")])
    assert lines[-1] == "The answer is 3901."
    told = server.requests[-1].body["messages"]
    assert told[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "3901"}
    assert told[-2]["tool_calls"][0]["function"]["arguments"] == call["function"]["arguments"]


def test_it_gives_up_after_a_few_turns() -> None:
    call = tool_call("calculator", {"expression": "1+1"})
    lines, server = run([Answer(text="", tool_calls=[call])] * 9)
    assert lines == ["I could not work it out."]
    assert len(server.requests) == 4
