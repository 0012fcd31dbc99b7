"""How many held-out tasks of examples/calculator a policy answers at temperature 1, at 0.5 and greedily.

Each policy is served by the embedded backend and asked by the example's own loop (its tools, its turns, its reward),
without agent processes, so that many samples cost seconds. Prints a table, then one JSON object.

    python benchmarks/demo_policy.py [FOLDER ...] [--samples 8]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from openai import AsyncOpenAI

from agl_runtime.config import Config
from agl_runtime.trainer.backends.embedded import create

EXAMPLE = Path(__file__).parent.parent / "examples" / "calculator"
TEMPERATURES = (1.0, 0.5, 0.0)
AT_ONCE = 32


def example(name: str) -> ModuleType:
    """A module of the example, found as its own user would find it."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return __import__(name)
    finally:
        sys.path.pop(0)


async def answer(client: AsyncOpenAI, agent: ModuleType, question: str, temperature: float) -> str:
    """What agent.py prints for `question`, with the temperature of our choice."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(agent.MAX_TURNS):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, tools=agent.TOOLS, temperature=temperature
        )
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = agent.run_tool(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def measure(policy: Path, samples: int) -> dict[str, float]:
    """Pass@1 by temperature, over `samples` answers to each held-out task (one where sampling is greedy)."""
    agent, reward = example("agent"), example("reward").reward
    tasks = [json.loads(line) for line in (EXAMPLE / "tasks" / "val.jsonl").read_text(encoding="utf-8").splitlines()]
    config = Config.model_validate({"agent": {"command": "none"}, "model": {"max_tokens": 48}})
    backend = create(config, policy)
    served = await backend.start(1, None)
    slots = asyncio.Semaphore(AT_ONCE)
    found: dict[str, float] = {}
    async with AsyncOpenAI(
        base_url=served.endpoint, api_key=served.api_key.get_secret_value() if served.api_key else "none"
    ) as client:

        async def score(task: dict[str, Any], temperature: float) -> float:
            async with slots:
                said = await answer(client, agent, task["question"], temperature)
            return float(reward(task, {"stdout": said}))

        for temperature in TEMPERATURES:
            asked = tasks * (samples if temperature else 1)
            rewards = await asyncio.gather(*[score(task, temperature) for task in asked])
            found[str(temperature)] = round(sum(rewards) / len(rewards), 3)
    await backend.stop()
    return found


def table(policies: Sequence[Path], samples: int) -> dict[str, dict[str, float]]:
    """Measure and print policy by policy."""
    print(f"{'pass@1 at temperature':<48}" + "".join(f"{t or 'greedy':>8}" for t in TEMPERATURES))
    found = {}
    for policy in policies:
        found[str(policy)] = asyncio.run(measure(policy, samples))
        print(f"{str(policy)[-48:]:<48}" + "".join(f"{value:>8.3f}" for value in found[str(policy)].values()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policies", nargs="*", type=Path, default=[EXAMPLE / "policy"])
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    found = table(args.policies, args.samples)
    print(json.dumps({"benchmark": "demo_policy", "samples": args.samples, "pass_at_1": found}))


if __name__ == "__main__":
    main()
