"""agl's rollout server for machines without a GPU, driven by verl's own workers and managers (`replica.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agl_runtime.trainer.backends.verl.setup import RUN_EPOCH, SERVER_KEY
from fakes.tiny_model import make_tiny_policy
from fakes.verl import run_in_verl

TOLERANCE = 1e-4  # of a log-probability, in nats: two ways to compute the same float32 sums


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("replica")
    policy = make_tiny_policy(folder / "policy", context=4096)
    environ = {SERVER_KEY: "secret", RUN_EPOCH: "3"}
    run_in_verl(Path(__file__).with_name("replica.py"), policy, folder / "found.json", "1", **environ)
    return dict(json.loads((folder / "found.json").read_text(encoding="utf-8")))


def test_after_an_update_the_weights_that_serve_are_those_that_train(found: dict[str, Any]):
    assert found["versions"] == [[["3.0"]], [["3.1"]]]
    (moved,) = found["moved"]
    assert moved > 100 * TOLERANCE
    assert max(gap for gaps in found["gaps"] for gap in gaps) < TOLERANCE


def test_no_call_is_served_asleep_or_between_an_abort_and_the_resume(found: dict[str, Any]):
    assert (found["asleep"], found["paused"], found["resumed"]) == ([503], [503], [200])


def test_an_abort_cuts_calls_short_and_counts_them_and_sleep_waits_for_their_end(found: dict[str, Any]):
    assert found["aborted"] == [[0], [1]]
    assert found["cut"] == [[False, True]]
