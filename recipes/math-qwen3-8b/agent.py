"""Solves a problem of mathematics with Python at hand: python agent.py "PROBLEM"."""

import json
import subprocess
import sys

from openai import OpenAI

INSTRUCTIONS = "\n\nYou may run Python to reckon or to check. End with a line `Answer: INTEGER`."
MOST_SHOWN = 2000
PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program of its own and get what it prints. Print what you want to know.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


def run(arguments: str) -> str:
    try:
        code = json.loads(arguments)["code"]
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=10)
    except (ValueError, KeyError, TypeError) as error:
        return f"no code: {error}"
    except subprocess.TimeoutExpired:
        return "stopped after 10 seconds"
    return (done.stdout + done.stderr)[-MOST_SHOWN:] or "(it printed nothing)"


def solve(problem: str) -> str:
    client, messages = OpenAI(), [{"role": "user", "content": problem + INSTRUCTIONS}]
    for _ in range(8):
        choice = client.chat.completions.create(model="policy", messages=messages, tools=[PYTHON]).choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if not choice.message.tool_calls:
            return choice.message.content or ""
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": run(call.function.arguments)}
            for call in choice.message.tool_calls
        ]
    return ""


if __name__ == "__main__":
    print(solve(sys.argv[1]))
