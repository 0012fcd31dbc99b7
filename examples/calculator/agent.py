"""Answers a question of arithmetic with the help of a calculator.

python agent.py "What is 47 times 83?"
"""

import ast
import json
import operator
import sys

from openai import OpenAI

MODEL = "gpt-4.1-mini"
MAX_TURNS = 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Work out an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "For example 12*3"}},
                "required": ["expression"],
            },
        },
    }
]
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> float:
    """The value of numbers, brackets and + - * /; anything else is a ValueError."""

    def value(node):
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError(f"cannot work out {expression!r}")

    return value(ast.parse(expression, mode="eval").body)


def run_tool(arguments: str) -> str:
    """The calculator's answer to a tool call; an error goes back to the model as text."""
    try:
        return str(calculate(json.loads(arguments)["expression"]))
    except (ValueError, SyntaxError, KeyError, TypeError, ArithmeticError) as error:
        return f"error: {error}"


def answer(question: str) -> str:
    client = OpenAI()
    messages = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = run_tool(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "I could not work it out."


if __name__ == "__main__":
    print(answer(sys.argv[1]))
