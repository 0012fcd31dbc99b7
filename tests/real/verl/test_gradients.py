"""The same recorded rollouts give the embedded backend and verl equal advantages and, to rounding, equal gradients.

verl runs for real (`gradients.py`), on one rank and on two; weights stay, so that the gradients of several mini-batches
are of the same weights, and their mean must be the gradient of the whole.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agl_runtime.config import VERL_ALGORITHMS, TrainConfig
from agl_runtime.trainer.backends.embedded.policy import load_policy
from agl_runtime.trainer.backends.embedded.update import Updater
from agl_runtime.trainer.backends.verl.managed import EXACT_LOSSES
from agl_runtime.trainer.scoring import score
from fakes.groups import candidates
from fakes.recorded_groups import CASES, TRAIN, Case, recorded_groups
from fakes.tiny_model import make_tiny_policy
from fakes.verl import ENV, verl_python

HERE = Path(__file__).parent
# float32 sums of some hundred terms in another order: some 2e-7 of the gradient's norm are seen.
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("reference") / "tiny", seed=1)


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def found(
    request: pytest.FixtureRequest, policy: Path, reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, Any]:
    output = tmp_path_factory.mktemp("verl") / "found.pt"
    run("gradients.py", policy, reference, output, ranks=request.param)
    return torch.load(output, weights_only=False)


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    output = tmp_path_factory.mktemp("verl") / "methods.json"
    run("methods.py", output)
    return json.loads(output.read_text())


def run(script: str, *arguments: Path, ranks: int = 1) -> None:
    """In verl's environment, with a process for each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {
        **os.environ,
        **ENV,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
    }
    command = [verl_python(), HERE / script, *arguments]
    started = [
        subprocess.Popen(
            command, env=environ | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)[-6000:]


def embedded(policy: Path, reference: Path, case: Case) -> dict[str, Tensor]:
    """The gradient of the embedded backend's only optimizer step, before any clipping of its norm."""
    loaded = load_policy(policy)
    settings = {"normalization": case.normalization, "kl_coef": case.kl_coef, "tis_cap": case.tis_cap, **TRAIN}
    config = TrainConfig(max_grad_norm=1e9, **settings)
    updater = Updater(loaded, config, load_policy(reference) if case.kl_coef else None)
    gradients: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        gradients.update({name: p.grad.clone() for name, p in loaded.model.named_parameters() if p.grad is not None})

    updater.optimizer.register_step_pre_hook(keep)
    scores = score(candidates(recorded_groups()), "grpo")
    metrics = updater.run(scores.rollouts, scores.totals, updates=3).metrics
    assert (metrics["tis_capped"] > 0) == (case.tis_cap is not None)
    assert (metrics["kl"] > 0) == (case.kl_coef > 0)
    return gradients


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_mean_of_verls_gradients_is_the_embedded_one(
    case: Case, found: dict[Case, Any], policy: Path, reference: Path
):
    steps = found[case]["steps"]
    rollouts = score(candidates(recorded_groups()), "grpo").rollouts
    assert len(steps) == min(case.mini_batches, len(rollouts))
    expected = embedded(policy, reference, case)
    assert all(step.keys() == expected.keys() for step in steps)
    assert all(any(gradient.any() for gradient in step.values()) for step in steps)
    apart = [sum(step[name] for step in steps) / len(steps) - gradient for name, gradient in expected.items()]
    assert norm(apart) < TOLERANCE * norm(expected.values())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verl_gives_every_trained_token_the_advantage_of_its_rollout(case: Case, found: dict[Case, Any]):
    expected = {
        f"{rollout.samples.rollout_id}_{n}": (torch.tensor(rollout.advantage).item(),) * int(sample.mask.sum())
        for rollout in score(candidates(recorded_groups()), "grpo").rollouts
        for n, sample in enumerate(rollout.samples.samples)
    }
    assert {key: values for key, values in found[case]["advantages"].items() if values} == expected


@pytest.mark.parametrize("algorithm", VERL_ALGORITHMS)
def test_where_rollouts_have_one_sample_an_estimator_is_verls_own(algorithm: str, methods: dict[str, Any]):
    assert methods["estimators"][algorithm] < 1e-6


def test_a_weight_in_the_advantage_is_a_weight_of_the_loss_under_exactly_the_losses_that_are_let_through(
    methods: dict[str, Any],
):
    assert {name for name, difference in methods["losses"].items() if difference < 1e-6} == set(EXACT_LOSSES)
    assert min(value for name, value in methods["losses"].items() if name not in EXACT_LOSSES) > 0.05


def norm(tensors: Any) -> float:
    return torch.cat([tensor.flatten() for tensor in tensors]).norm().item()
