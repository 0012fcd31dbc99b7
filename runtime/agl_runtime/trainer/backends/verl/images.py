"""Images of recorded calls as verl's models expect them: features by the model's own processor, and positions.

What an agent was shown stands in the messages of its calls; a row's last call has the whole conversation, so its images
in their order are those of the row's image tokens. Only images that are in the messages themselves (data URLs) can be
seen again. A row whose images cannot be had, or do not account for its image tokens exactly, is left out with a reason:
wrong features would be worse than none.
"""

from __future__ import annotations

import base64
import binascii
import inspect
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from agl_runtime.samples.types import RolloutSamples, Sample

Inputs = dict[str, Tensor]
NOT_HERE = "image_not_in_call"
UNREADABLE = "image_unreadable"
OTHER_TOKENS = "image_tokens_differ"
_DATA_URL = "data:"
_OF_TEXT = {"attention_mask", "mm_token_type_ids"}  # of the text that the processor was given, not of the row


class UnseenError(Exception):
    """The row's images cannot be given to the model; the argument is the reason."""


class Eye(Protocol):
    """How a model sees."""

    def look(self, images: Sequence[Any]) -> tuple[Inputs, int]:
        """The model's inputs for PIL images, and how many image tokens stand for them."""
        ...

    def count(self, ids: Tensor) -> int:
        """Image tokens in `ids` [T]."""
        ...

    def positions(self, ids: Tensor, inputs: Inputs) -> Tensor:
        """`position_ids` of a row, [T] or [4, T]."""
        ...


class VerlEye:
    """By verl's processor of a model, to which verl binds the model's own rule for positions."""

    def __init__(self, processor: Any) -> None:
        from verl.experimental.agent_loop import AgentLoopWorker
        from verl.utils.tokenizer import get_processor_token_id

        self._processor = processor
        self._token = get_processor_token_id(processor, "image")
        # Of verl's agent loop no more than its positions is wanted, which ask for a processor alone.
        self._loop = AgentLoopWorker.__new__(AgentLoopWorker)
        self._loop.processor = processor
        rule = getattr(processor, "get_rope_index", None)
        self._marks = rule is not None and "mm_token_type_ids" in inspect.signature(rule).parameters

    def look(self, images: Sequence[Any]) -> tuple[Inputs, int]:
        text = self._processor.image_token * len(images)
        made = dict(self._processor(text=[text], images=list(images), return_tensors="pt"))
        ids = made.pop("input_ids")[0]
        return {name: made[name] for name in made.keys() - _OF_TEXT}, self.count(ids)

    def count(self, ids: Tensor) -> int:
        return int((ids == self._token).sum())

    def positions(self, ids: Tensor, inputs: Inputs) -> Tensor:
        # A mark of which tokens are images, as newer processors make it of their text, has verl make the row's.
        marked = inputs | ({"mm_token_type_ids": ids} if self._marks else {})
        found: Tensor = self._loop._compute_position_ids(ids[None], torch.ones_like(ids)[None], marked, {})
        return found[0]


class Blind:
    """In place of a processor that verl does not know, or that lacks a package: rows with images are left out."""

    def __init__(self, token: int) -> None:
        self._token = token

    def look(self, images: Sequence[Any]) -> tuple[Inputs, int]:
        return {}, 0

    def count(self, ids: Tensor) -> int:
        return int((ids == self._token).sum())

    def positions(self, ids: Tensor, inputs: Inputs) -> Tensor:
        return torch.arange(ids.numel())


def eye_of(policy: Path) -> Eye | None:
    """Of the model in a Hugging Face folder; None for one that sees nothing."""
    from verl.utils import hf_processor

    token = json.loads((policy / "config.json").read_text(encoding="utf-8")).get("image_token_id")
    if token is None:
        return None
    processor = hf_processor(str(policy))
    return VerlEye(processor) if processor else Blind(token)


def has_images(eye: Eye, samples: Sequence[Sample]) -> bool:
    return any(eye.count(_ids(sample)) for sample in samples)


def see(
    eye: Eye, built: RolloutSamples, messages: Mapping[str, Sequence[Any]]
) -> tuple[RolloutSamples, dict[int, Inputs]]:
    """`built` without the samples whose images cannot be had, and the inputs of those that have some, by the samples'
    identity. `messages` are those of each call."""
    kept, inputs, lost = [], {}, Counter[str]()
    for sample in built.samples:
        try:
            found = _inputs(eye, sample, messages)
        except UnseenError as error:
            lost[str(error)] += 1
            continue
        kept.append(sample)
        if found:
            inputs[id(sample)] = found
    return built.keeping(kept, lost), inputs


def row_fields(eye: Eye, sample: Sample, inputs: Inputs) -> dict[str, Any]:
    """What a row of a model that sees has besides, images or not."""
    return {"position_ids": eye.positions(_ids(sample), inputs), "multi_modal_inputs": inputs}


def _ids(sample: Sample) -> Tensor:
    return torch.from_numpy(sample.ids.astype(np.int64))


def _inputs(eye: Eye, sample: Sample, messages: Mapping[str, Sequence[Any]]) -> Inputs:
    there = eye.count(_ids(sample))
    if not there:
        return {}
    images = [_image(url) for url in _urls(messages.get(sample.call_ids[-1], ()))]
    inputs, tokens = eye.look(images) if images else ({}, 0)
    if tokens != there:
        raise UnseenError(OTHER_TOKENS)
    return inputs


def _urls(messages: Sequence[Any]) -> Iterator[str]:
    for message in messages:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type") == "image_url":
                url = part["image_url"]
                yield url["url"] if isinstance(url, dict) else url


def _image(url: str) -> Any:
    from PIL import Image, UnidentifiedImageError

    if not url.startswith(_DATA_URL):
        raise UnseenError(NOT_HERE)
    try:
        return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2], validate=True))).convert("RGB")
    except (binascii.Error, UnidentifiedImageError, OSError) as error:
        raise UnseenError(UNREADABLE) from error
