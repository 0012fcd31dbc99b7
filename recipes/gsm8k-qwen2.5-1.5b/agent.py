"""Answers a question with a calculator at hand: python agent.py "QUESTION"."""

import json
import re
import sys

from openai import OpenAI

SYSTEM = "Solve the problem step by step. Use the calculator. End with a line `Answer: NUMBER`."
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "The value of an arithmetic expression of numbers, + - * / and brackets.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(arguments: str) -> str:
    try:
        expression = json.loads(arguments)["expression"].replace(",", "")
        if not re.fullmatch(r"[\d\s.()+*/-]{1,200}", expression) or "**" in expression:
            return "error: only numbers, + - * / and brackets"
        return str(eval(expression, {"__builtins__": {}}))
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError, ArithmeticError) as error:
        return f"error: {error}"


def main(question: str, turns: int = 6) -> None:
    client = OpenAI()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(turns):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            print(message.content or "")
            return
        for call in message.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main(sys.argv[1])
