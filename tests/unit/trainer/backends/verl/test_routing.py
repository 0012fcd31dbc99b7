from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from agl_runtime.trainer.backends.verl.routing import routed_only, routing_field
from agl_runtime.trainer.backends.verl.rows import ScoredSamples, group_rows
from fakes.trained import make_samples

SHAPE = (2, 3)


def test_rows_whose_routing_is_unknown_or_another_models_are_left_out_and_counted() -> None:
    plain = make_samples(samples=3)
    size = plain.samples[0].ids.size
    routed = [np.ones((size, *SHAPE), np.uint8), None, np.ones((size, 1, 3), np.uint8)]
    built = replace(plain, samples=tuple(replace(s, routed=r) for s, r in zip(plain.samples, routed, strict=True)))
    kept = routed_only(built, SHAPE)
    assert kept.samples == built.samples[:1]
    assert kept.report.dropped == {"routing_not_recorded": 2}
    assert kept.report.trained_tokens == int(built.samples[0].mask.sum())
    assert routed_only(kept, SHAPE) == kept


def test_every_row_of_a_group_has_the_field_placeholders_too() -> None:
    plain = make_samples()
    routed = np.arange(plain.samples[0].ids.size * 6, dtype=np.uint8).reshape(-1, *SHAPE)
    teaches = replace(plain, samples=(replace(plain.samples[0], routed=routed),))
    empty = replace(plain, samples=(), report=replace(plain.report, trained_tokens=0))
    scored = [ScoredSamples(0, 1.0, teaches), ScoredSamples(1, 0.0, empty)]
    rows = group_rows("g", scored, 1, besides=lambda sample: routing_field(sample, SHAPE)).fields
    assert [row["routed_experts"].dtype for row in rows] == [torch.int16] * 2
    assert rows[0]["routed_experts"].tolist() == routed.tolist()
    assert rows[1]["routed_experts"].tolist() == np.zeros((2, *SHAPE)).tolist()
