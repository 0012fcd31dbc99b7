"""One tiny random policy for all tests of this folder; tests that change weights load their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.policy import Policy, load_policy
from fakes.tiny_model import make_tiny_policy


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="session")
def policy(policy_folder: Path) -> Policy:
    return load_policy(policy_folder)


@pytest.fixture(scope="session")
def endless(policy: Policy) -> Policy:
    """The same policy, whose answers only end at `max_tokens`."""
    return replace(policy, stop_ids=frozenset())


@pytest.fixture
def fresh_policy(policy_folder: Path) -> Callable[[], Policy]:
    return lambda: load_policy(policy_folder)


@pytest.fixture(scope="session")
def codec(policy: Policy) -> Codec:
    return Codec(policy.tokenizer, policy.stop_ids)
