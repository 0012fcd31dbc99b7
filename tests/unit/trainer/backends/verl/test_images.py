from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agl_runtime.calls import ids_array
from agl_runtime.samples.types import RolloutSamples
from agl_runtime.trainer.backends.verl.images import Blind, has_images, row_fields, see
from fakes.trained import make_samples

PIL = pytest.importorskip("PIL.Image", reason="no pillow, which the verl backend's environment has")
IMAGE_TOKEN = 7


class FakeEye:
    """Sees one image token for every eight columns of an image."""

    def look(self, images: Sequence[Any]) -> tuple[dict[str, Tensor], int]:
        widths = [image.width for image in images]
        return {"pixel_values": torch.tensor([image.getpixel((0, 0)) for image in images])}, sum(widths) // 8

    def count(self, ids: Tensor) -> int:
        return int((ids == IMAGE_TOKEN).sum())

    def positions(self, ids: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return torch.arange(len(ids)).expand(4, -1) + len(inputs)


def image(width: int, colour: str = "red") -> dict[str, Any]:
    file = io.BytesIO()
    PIL.new("RGB", (width, 8), colour).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def shown(*parts: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [{"type": "text", "text": "look"}, *parts]},
        {"role": "assistant", "content": "so"},
    ]


def built(*image_tokens: int) -> RolloutSamples:
    """A sample for each number of image tokens, which stand in its prompt; its last call is named by its place."""
    plain = make_samples(samples=len(image_tokens))
    samples = []
    for place, (sample, count) in enumerate(zip(plain.samples, image_tokens, strict=True)):
        more = [IMAGE_TOKEN] * count

        def longer(array: np.ndarray, count: int = count) -> np.ndarray:
            return np.concatenate([np.zeros(count, array.dtype), array])

        samples.append(
            replace(
                sample,
                ids=ids_array([*more, *sample.ids]),
                mask=longer(sample.mask),
                logprobs=longer(sample.logprobs),
                updates=longer(sample.updates),
                prompt_len=sample.prompt_len + count,
                call_ids=("first", f"c{place}"),
            )
        )
    return replace(plain, samples=tuple(samples))


def test_a_rows_images_are_those_of_its_last_call_in_their_order() -> None:
    samples, inputs = see(FakeEye(), built(3), {"c0": shown(image(8, "red"), image(16, "blue")), "first": []})
    (sample,) = samples.samples
    assert inputs[id(sample)]["pixel_values"].tolist() == [[255, 0, 0], [0, 0, 255]]


def test_a_row_without_images_has_positions_of_its_model_and_no_features() -> None:
    samples, inputs = see(FakeEye(), built(0), {"c0": shown()})
    assert inputs == {}
    fields = row_fields(FakeEye(), samples.samples[0], {})
    assert fields["position_ids"].shape == (4, samples.samples[0].ids.size)
    assert fields["multi_modal_inputs"] == {}


@pytest.mark.parametrize(
    ("tokens", "parts", "reason"),
    [
        (1, [{"type": "image_url", "image_url": {"url": "https://example.test/a.png"}}], "image_not_in_call"),
        (1, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "image_unreadable"),
        (1, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}], "image_unreadable"),
        (2, [image(8)], "image_tokens_differ"),
        (1, [], "image_tokens_differ"),
    ],
)
def test_a_row_whose_images_cannot_be_had_is_left_out_and_counted(tokens: int, parts: list[Any], reason: str) -> None:
    before = built(tokens, 0)
    samples, inputs = see(FakeEye(), before, {"c0": shown(*parts), "c1": shown()})
    assert samples.samples == before.samples[1:]
    assert samples.report.dropped == {reason: 1}
    assert samples.report.trained_tokens == int(before.samples[1].mask.sum())
    assert inputs == {}


def test_a_model_whose_processor_is_missing_trains_on_rows_without_images_alone() -> None:
    before, blind = built(1, 0), Blind(IMAGE_TOKEN)
    assert has_images(blind, before.samples)
    samples, _ = see(blind, before, {"c0": shown(image(8)), "c1": shown()})
    assert samples.samples == before.samples[1:]
    assert not has_images(blind, samples.samples)
