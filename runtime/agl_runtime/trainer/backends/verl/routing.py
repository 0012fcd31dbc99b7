"""Routing replay: rows carry the experts that the model servers chose for their tokens (pure; imports no verl).

verl's engines replay the whole row, prompt and response, and cannot tell a token whose experts are unknown from one
that went to the first expert. So a row whose routing is not all on record is left out, with a count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from agl_runtime.samples.types import RolloutSamples, Sample

UNROUTED = "routing_not_recorded"
Shape = tuple[int, int]
"""Layers of the model, and experts of a token in each."""


def routed_only(built: RolloutSamples, shape: Shape) -> RolloutSamples:
    """`built` without the samples that have no routing of this shape."""
    kept = [sample for sample in built.samples if sample.routed is not None and sample.routed.shape[1:] == shape]
    return built.keeping(kept, {UNROUTED: len(built.samples) - len(kept)})


def routing_field(sample: Sample, shape: Shape) -> dict[str, Any]:
    """As verl's agent loops write it: `routed_experts` [T, layers, k]; zeros of a placeholder."""
    routed = np.zeros((sample.ids.size, *shape)) if sample.routed is None else sample.routed
    return {"routed_experts": torch.from_numpy(routed.astype(np.int16))}
