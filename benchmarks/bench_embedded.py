"""Tokens a second of the embedded backend over HTTP, with 1, 8 and 32 agents that call it at once.

Each agent asks one question after another, as the calculator example does, with token ids and log-probabilities.
Prints a table, then one JSON object. CPU seconds are those of the whole process, the HTTP client included.
`logprob_gap` is the largest difference between a told log-probability and that of a pass over the whole sequence.

    python benchmarks/bench_embedded.py [--policy FOLDER] [--calls 20]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch

from agl_runtime.config import Config
from agl_runtime.trainer.backends.embedded import create
from agl_runtime.trainer.backends.embedded.policy import load_policy

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "calculator"
AGENTS = (1, 8, 32)
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class Round:
    """What a crowd of agents got: whole answers, and how long they took."""

    answers: list[dict[str, Any]]
    wall_s: float
    cpu_s: float

    @property
    def tokens(self) -> int:
        return sum(len(answer["choices"][0]["token_ids"]) for answer in self.answers)


async def measure(policy: Path, questions: list[str], calls: int) -> dict[int, Round]:
    backend = create(Config.model_validate({"agent": {"command": "agent"}, "model": {"max_tokens": 64}}), policy)
    model = await backend.start(1, None)
    rounds = {}
    headers = {"Authorization": f"Bearer {model.api_key.get_secret_value()}"} if model.api_key else {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
        await crowd(session, model.endpoint, questions, 8, 2)  # warms up
        for agents in AGENTS:
            wall, cpu = time.monotonic(), time.process_time()
            answers = await crowd(session, model.endpoint, questions, agents, calls)
            rounds[agents] = Round(answers, time.monotonic() - wall, time.process_time() - cpu)
    await backend.stop()
    return rounds


async def crowd(
    session: aiohttp.ClientSession, endpoint: str, questions: list[str], agents: int, calls: int
) -> list[dict[str, Any]]:
    async def agent(number: int) -> list[dict[str, Any]]:
        return [await ask(session, endpoint, questions[(number * calls + n) % len(questions)]) for n in range(calls)]

    return [answer for answers in await asyncio.gather(*map(agent, range(agents))) for answer in answers]


async def ask(session: aiohttp.ClientSession, endpoint: str, question: str) -> dict[str, Any]:
    body = {"model": "policy", "messages": [{"role": "user", "content": question}], "tools": [CALCULATOR]}
    extras = {"logprobs": True, "return_token_ids": True}
    async with session.post(f"{endpoint}/chat/completions", json={**body, **extras}, raise_for_status=True) as response:
        answer: dict[str, Any] = await response.json()
        return answer


@torch.no_grad()
def logprob_gap(folder: Path, answers: list[dict[str, Any]]) -> float:
    model = load_policy(folder).model
    gap = 0.0
    for answer in answers:
        prompt, choice = answer["prompt_token_ids"], answer["choices"][0]
        sampled = torch.tensor(choice["token_ids"])
        logits = model(torch.tensor([prompt + choice["token_ids"]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        want = logits.log_softmax(-1).gather(1, sampled[:, None])[:, 0]
        told = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        gap = max(gap, float((want - told).abs().max()))
    return gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--policy", type=Path, default=EXAMPLE / "policy")
    parser.add_argument("--calls", type=int, default=20, help="calls of each agent")
    args = parser.parse_args()
    lines = (EXAMPLE / "tasks" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rounds = asyncio.run(measure(args.policy, [json.loads(line)["question"] for line in lines], args.calls))
    result: dict[str, Any] = {}
    print(f"{'agents':>6} {'tokens/s':>9} {'tokens/CPU s':>13} {'logprob gap':>12}")
    for agents, done in rounds.items():
        gap = logprob_gap(args.policy, done.answers)
        print(f"{agents:>6} {done.tokens / done.wall_s:>9.0f} {done.tokens / done.cpu_s:>13.0f} {gap:>12.1e}")
        result[str(agents)] = {
            "tokens_per_s": round(done.tokens / done.wall_s),
            "tokens_per_cpu_s": round(done.tokens / done.cpu_s),
            "logprob_gap": gap,
        }
    print(json.dumps({"benchmark": "embedded", "cores": os.cpu_count(), "agents": result}))


if __name__ == "__main__":
    main()
