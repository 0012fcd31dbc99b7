"""Experts that a model server recorded are those that verl's FSDP engine trains by (`replay.py`, `routing.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.verl import one_rank, run_in_verl

TOLERANCE = 1e-5  # of the gradient's norm: float32 sums in another order


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("routing")
    run_in_verl(Path(__file__).with_name("routing.py"), folder / "policy", folder / "found.pt", **one_rank())
    return torch.load(folder / "found.pt", weights_only=True)


def apart(found: dict[str, Any], one: str, other: str) -> float:
    """The distance of two gradients as a share of their norm."""
    ours, theirs = (found[name]["gradient"] for name in (one, other))
    assert ours.keys() == theirs.keys()
    norm = torch.cat([gradient.flatten() for gradient in theirs.values()]).norm()
    return float(torch.cat([(ours[name] - theirs[name]).flatten() for name in ours]).norm() / norm)


@pytest.mark.parametrize("one", ["own", "own_packed", "own_plain"])
def test_replaying_what_the_weights_choose_is_recomputing_it(found: dict[str, Any], one: str) -> None:
    assert apart(found, one, "recomputed") < TOLERANCE
    torch.testing.assert_close(found[one]["logprobs"], found["recomputed"]["logprobs"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("one", ["other", "other_packed"])
def test_other_experts_give_the_gradient_of_a_model_whose_routers_are_made_to_choose_them(
    found: dict[str, Any], one: str
) -> None:
    assert apart(found, one, "other_plain") < TOLERANCE
    torch.testing.assert_close(found[one]["logprobs"], found["other_plain"]["logprobs"], atol=1e-5, rtol=0)
    assert apart(found, one, "recomputed") > 1000 * TOLERANCE
    assert any(gradient.any() for name, gradient in found[one]["gradient"].items() if name.endswith("gate.weight"))


@pytest.mark.parametrize("one", ["after_packedFalse", "after_packedTrue"])
def test_a_batch_without_routing_is_routed_by_the_model(found: dict[str, Any], one: str) -> None:
    assert apart(found, one, "recomputed") < TOLERANCE


def test_rows_have_the_experts_in_the_form_of_verls_own_agent_loops(found: dict[str, Any]) -> None:
    assert found["as_verls"]


def test_a_model_without_routers_is_refused(found: dict[str, Any]) -> None:
    assert found["dense"] == "train.routing_replay finds no router in this model. Set it to false."
