"""The run that several modules look at: it takes minutes, so there is one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest

from fakes.planted import SHELL
from fakes.verl_run import KILLED_AFTER, UPDATES, VerlRun


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VerlRun]:
    """Asynchronous, with every tracker that is installed, and secrets in its shell. Everything that `agl up` started
    was killed in the middle, and `agl up` ran again."""
    folder = tmp_path_factory.mktemp("run")
    train = {"steps": UPDATES, "active_groups": 8, "trackers": ["console", "tensorboard", "wandb"]}
    run = VerlRun(folder / "calculator", train)
    ray = tempfile.mkdtemp(prefix="ray-")  # short: it holds sockets
    run.env |= SHELL | {"HOME": str(folder / "home"), "RAY_TMPDIR": ray, "WANDB_MODE": "offline"}
    run.up_until(KILLED_AFTER)
    assert run.up() == 0, run.said
    assert "starting Ray and verl (a minute or two)" in run.said
    yield run
    shutil.rmtree(ray)
