"""Policies that really sample what the tests look for, and the embedded backend over one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from agl_runtime.config import Config
from agl_runtime.schemas import Model
from agl_runtime.trainer.backends.embedded import create
from agl_runtime.trainer.backends.embedded.backend import EmbeddedBackend
from fakes.tiny_model import make_tiny_policy

QUESTION = [{"role": "user", "content": "What is 12+7?"}]
ARGUMENTS = '{"expression": "12+7"}'
ANSWER = 'Let me see.\n<tool_call>\n{"name": "calculator", "arguments": ' + ARGUMENTS + "}\n</tool_call>"


@pytest.fixture(scope="session")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy."""
    return make_tiny_policy(tmp_path_factory.mktemp("policy") / "noise", context=2048)


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that answers QUESTION with ANSWER."""
    return make_tiny_policy(tmp_path_factory.mktemp("policy") / "caller", lessons=[(QUESTION, ANSWER)])


def config(**train: Any) -> Config:
    settings = {"lr": 1e-2, "group_size": 2, **train}
    return Config.model_validate({"agent": {"command": "agent"}, "model": {"max_tokens": 1000}, "train": settings})


Start = Callable[..., Awaitable[tuple[EmbeddedBackend, Model, openai.AsyncOpenAI]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts backends, each with an official client of its server, and ends them."""
    running: list[tuple[EmbeddedBackend, openai.AsyncOpenAI]] = []

    async def start(
        policy: Path, *, run_epoch: int = 1, resume_from: Path | None = None, **train: Any
    ) -> tuple[EmbeddedBackend, Model, openai.AsyncOpenAI]:
        backend = create(config(**train), policy)
        assert isinstance(backend, EmbeddedBackend)
        model = await backend.start(run_epoch, resume_from)
        assert model.api_key is not None
        client = openai.AsyncOpenAI(base_url=model.endpoint, api_key=model.api_key.get_secret_value(), max_retries=0)
        running.append((backend, client))
        return backend, model, client

    yield start
    for backend, client in running:
        await client.close()
        await backend.stop()
