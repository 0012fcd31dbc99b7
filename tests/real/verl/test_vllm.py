"""`agl up` with real verl, whose rollout server is a real vLLM in an environment of its own, reached over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from fakes.verl_run import VerlRun
from fakes.vllm import TOLERANCE, serving

UPDATES = 5
WITHHELD = 3  # vLLM does not get the weights of this update, which the next step is sampled from
HALF, WIDE = 12, 16  # of a head's dimensions, as the example has them and as vLLM's kernels for CPUs do


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> VerlRun:
    folder = tmp_path_factory.mktemp("vllm")
    run = VerlRun(folder / "calculator", {"steps": UPDATES}, validated=8)
    run.env |= {"VERL_USE_EXTERNAL_MODULES": "fakes.verl_vllm", "AGL_TEST_WITHHELD": str(WITHHELD)}
    widen(run.root / "policy")
    with serving(run.root / "policy", folder) as vllm:
        run.env["AGL_TEST_VLLM"] = str(vllm.base_url)
        assert run.up() == 0, f"{run.said}\n{run.log()[-3000:]}"
    return run


def test_the_run_completes_and_every_update_learns(run: VerlRun) -> None:
    assert (run.summary["ended"], run.summary["steps"]) == ("complete", UPDATES)
    assert [step["step"] for step in run.steps()] == list(range(1, UPDATES + 1))
    assert all(step["grad_norm"] > 0 and step["untrained"] == {} for step in run.steps())


def test_after_each_update_vllm_serves_the_trainers_weights(run: VerlRun) -> None:
    """And where it was not given them, the gap of log-probabilities shows it."""
    gaps = [step["logprob_gap"] for step in run.steps()]
    assert gaps.pop(WITHHELD) > 100 * TOLERANCE
    assert max(gaps) < TOLERANCE


def widen(policy: Path) -> None:
    """Heads of the size that vLLM has, in a model that computes the same: the new dimensions are zero."""
    file = policy / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["head_dim"] = 2 * WIDE
    config["rope_parameters"]["rope_theta"] **= WIDE / HALF  # so that the first HALF frequencies stay
    file.write_text(json.dumps(config), encoding="utf-8")
    file = policy / "model.safetensors"
    save_file({name: widened(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def widened(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Each half of a head gets its new dimensions at its end, as the rotation pairs the halves."""
    more = WIDE - HALF
    if name.endswith(("q_norm.weight", "k_norm.weight")):  # undo what zeros do to the mean square, and the scale's root
        return pad(tensor.view(2, HALF), (0, more)).flatten() * (HALF / WIDE) ** 0.25
    if name.endswith("o_proj.weight"):
        return pad(tensor.view(len(tensor), -1, HALF), (0, more)).flatten(1)
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return pad(tensor.view(-1, HALF, tensor.shape[1]), (0, 0, 0, more)).flatten(0, 1)
    return tensor
