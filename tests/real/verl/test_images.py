"""An image that an agent showed the model reaches verl's batch as the model expects it (`images.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.verl import one_rank, run_in_verl

TOLERANCE = 1e-4  # of a log-probability, in nats: two float32 implementations of the same sums


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("images")
    run_in_verl(Path(__file__).with_name("images.py"), folder / "policy", folder / "found.json", **one_rank())
    return json.loads((folder / "found.json").read_text())


def test_the_images_features_are_in_the_batch(found: dict[str, Any]) -> None:
    assert found["fields"]["image_grid_thw"] == [1, 3]
    assert found["fields"]["pixel_values"][0] == 16  # patches of one image


def test_verl_sees_what_a_plain_forward_pass_sees(found: dict[str, Any]) -> None:
    assert found["seen"] == pytest.approx(found["plain"], abs=TOLERANCE)


def test_another_image_gives_other_log_probabilities_and_the_loss_has_a_gradient(found: dict[str, Any]) -> None:
    assert found["other"] != pytest.approx(found["seen"], abs=10 * TOLERANCE)
    assert found["grad_norm"] > 0
