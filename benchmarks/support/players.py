"""Rollouts of examples/calculator/consensus.py in one process: the embedded engine, and no HTTP between.

Wordings, agreement, tools, turns and reward are the example's own; prompts are rendered and answers read as the model
server does it, and every call is recorded as the gateway records it. What the agents of a batch ask is answered in
rounds, so that equal weights and equal names give equal rollouts.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agl_runtime.calls import Call, CallInfo, RolloutCalls, ids_array
from agl_runtime.trainer.backends.embedded.codec import Codec, Message
from agl_runtime.trainer.backends.embedded.engine import Engine
from agl_runtime.trainer.backends.embedded.generation import Generation
from agl_runtime.trainer.backends.embedded.sampling import SamplingParams
from agl_runtime.trainer.backends.embedded.tools import ToolCall, ToolReader

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "calculator"
MOST_TOKENS = 48
Talk = Generator[list[Message], Message, str]
"""An agent: yields the messages of a call, is sent the model's, returns what it prints."""


@dataclass
class Player:
    """One rollout under way. `name` decides its random draws; `said` is set when the agent has ended."""

    name: str
    talk: Talk
    asks: list[Message] | None
    calls: list[Call] = field(default_factory=list)
    said: str = ""

    def hear(self, message: Message) -> None:
        try:
            self.asks = self.talk.send(message)
        except StopIteration as end:
            self.asks, self.said = None, end.value


class Players:
    """Plays the example against an engine that has been started and answers nobody else."""

    def __init__(self, engine: Engine, codec: Codec) -> None:
        self._engine = engine
        self._codec = codec
        sys.path.insert(0, str(EXAMPLE))
        try:
            self._agent, self._consensus, reward = map(__import__, ("agent", "consensus", "reward"))
        finally:
            sys.path.pop(0)
        self._reward = reward.reward

    def play(self, tasks: Sequence[dict[str, Any]], names: Sequence[str]) -> list[RolloutCalls]:
        """A rollout of each task, all at once, with its reward."""
        players = [self._begin(task["question"], name) for task, name in zip(tasks, names, strict=True)]
        while asking := [player for player in players if player.asks is not None]:
            self._answer(asking)
        return [
            RolloutCalls(p.name, p.name, tuple(p.calls), self._reward(task, {"stdout": p.said}))
            for task, p in zip(tasks, players, strict=True)
        ]

    def _begin(self, question: str, name: str) -> Player:
        talk = self._ask_until_agreed(question)
        return Player(name, talk, next(talk))

    def _ask_until_agreed(self, question: str) -> Talk:
        answers: list[str] = []
        for asked in self._consensus.wordings(question):
            answers.append((yield from self._converse(asked)))
            if number := self._consensus.agreed(answers):
                return f"The answer is {number}."
        return "No two answers agree."

    def _converse(self, question: str) -> Talk:
        messages: list[Message] = [{"role": "user", "content": question}]
        for _ in range(self._agent.MAX_TURNS):
            message = yield messages
            messages.append(message)
            if not message["tool_calls"]:
                return message["content"] or ""
            results = [self._agent.run_tool(call["function"]["arguments"]) for call in message["tool_calls"]]
            messages += [{"role": "tool", "content": result} for result in results]
        return "I could not work it out."

    def _answer(self, players: Sequence[Player]) -> None:
        """One call of each."""
        generations = [self._generation(player) for player in players]
        # Submitted by the engine's own thread they are all there before its next step: batches do not depend on time.
        self._engine.call(lambda: [self._engine.submit(generation) for generation in generations]).result()
        for player, generation in zip(players, generations, strict=True):
            generation.changed.wait()
            if generation.finish == "error":
                raise SystemExit("The engine failed; its log says why.")
            player.calls.append(_recorded(player, generation))
            player.hear(self._message(generation.ids))

    def _generation(self, player: Player) -> Generation:
        prompt = self._codec.render(player.asks or [], self._agent.TOOLS, {})
        seed = f"{player.name}/{len(player.calls)}"
        return Generation(prompt, SamplingParams(MOST_TOKENS), threading.Event(), seed)

    def _message(self, ids: Sequence[int]) -> Message:
        reader = ToolReader()
        pieces = [*reader.push(self._codec.decode(self._codec.visible(ids))), *reader.finish()]
        calls = [
            {"id": piece.call_id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}
            for piece in pieces
            if isinstance(piece, ToolCall)
        ]
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        return {"role": "assistant", "content": text or None, "tool_calls": calls}


def _recorded(player: Player, generation: Generation) -> Call:
    number = len(player.calls)
    info = CallInfo(
        call_id=f"{player.name}/{number}",
        rollout_id=player.name,
        attempt_id=player.name,
        seq=number,
        dialect="chat",
        committed=True,
        commit_seq=number,
        delivered=True,
        trainable=True,
    )
    logprobs = np.array([token.logprob for token in generation.tokens], np.float32)
    prompt, sampled = ids_array(generation.prompt), ids_array(generation.ids)
    return Call(info, prompt, sampled, logprobs, tuple(generation.spans()))


def tasks(name: str) -> list[dict[str, Any]]:
    """Those of the example's file `name`, "train" or "val"."""
    lines = (EXAMPLE / "tasks" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
