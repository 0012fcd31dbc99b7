"""The example agents as their owner runs them, against a model server over real HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fakes.model_server import Answer, FakeModelServer, tool_call

EXAMPLE = Path(__file__).parents[3] / "examples" / "calculator"


def run(answers: Sequence[Answer], agent: str = "agent.py") -> tuple[list[str], FakeModelServer]:
    """The lines that the agent printed, and the server it asked."""
    with FakeModelServer(answers) as server:
        env = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "test"}
        command = [sys.executable, str(EXAMPLE / agent), "What is 47 times 83?"]
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


def test_the_consensus_agent_begins_anew_until_two_answers_agree() -> None:
    answers = [Answer(f"I would say {number}.") for number in (1, 3901, 5, 3901)]
    lines, server = run(answers, "consensus.py")
    assert lines == ["The answer is 3901."]
    asked = [[message["content"] for message in request.body["messages"]] for request in server.requests]
    assert [len(messages) for messages in asked] == [1] * 4
    assert asked[0] == ["What is 47 times 83?"]
    assert len({messages[0] for messages in asked}) == 4


def test_the_consensus_agent_says_so_when_no_two_answers_agree() -> None:
    lines, server = run([Answer(f"I would say {number}.") for number in range(9)], "consensus.py")
    assert lines == ["No two answers agree."]
    assert len(server.requests) == 5
