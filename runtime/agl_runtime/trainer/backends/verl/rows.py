"""From the samples of one whole group to the rows that verl's trainer reads (pure; imports no verl).

A row is a sample. A rollout that counts and is not computed (nothing of it can be trained, or the rewards of its group
do not differ) is one placeholder row of two tokens with mask 0, so that baselines and denominators are those of
`trainer/scoring.py`. A rollout without a reward has no row.

verl hands its estimators one string a row, the field `uid`: here the row's label, which says all that advantages and
weights need. It is exact, where verl's own scores are float32, and no later mask changes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch

from agl_runtime.algorithms.advantages import group_advantages
from agl_runtime.samples.types import RolloutSamples, Sample

_SEPARATOR = ":"


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """A rollout of a group: its number within the group, its reward (None where it has none) and its samples."""

    session: int
    reward: float | None
    samples: RolloutSamples


@dataclass(frozen=True, slots=True)
class Label:
    """`samples` and `tokens` count the rollout's samples and trained tokens, `row_tokens` those trained in this row;
    `length` is the row's number of response tokens, on the last of which verl keeps the score."""

    group: str
    session: int
    samples: int
    tokens: int
    row_tokens: int
    length: int
    reward: float

    def __str__(self) -> str:
        return _SEPARATOR.join(map(str, astuple(self)))

    @classmethod
    def parse(cls, text: str) -> Label | None:
        """None for the rows that verl adds to fill a batch."""
        if _SEPARATOR not in text:
            return None
        group, *counts, reward = text.split(_SEPARATOR)
        session, samples, tokens, row_tokens, length = map(int, counts)
        return cls(group, session, samples, tokens, row_tokens, length, float(reward))


@dataclass(frozen=True, slots=True)
class Rows:
    """Of one length: keys `{uid}_{session}_{index}`, fields (every row has the same) and tags, as verl's agent loops
    write them. The tag `trained_tokens` is 0 where a row cannot give a gradient."""

    keys: tuple[str, ...]
    fields: tuple[Mapping[str, Any], ...]
    tags: tuple[Mapping[str, Any], ...]


def group_rows(
    uid: str,
    rollouts: Sequence[ScoredSamples],
    step: int,
    *,
    validate: bool = False,
    flat_trains: bool = False,
    besides: Callable[[Sample], Mapping[str, Any]] = lambda _: {},
) -> Rows:
    """The rows of the complete group `uid` (no underscore, no colon), made for training step `step`. `flat_trains`:
    compute also a group whose rewards do not differ (`estimators.WITHOUT_GROUPS`). `validate`: one row a rollout, its
    last sample, under the plain `uid`. `besides`: fields of a row beyond the usual, or in their place. Raises
    TrainerError for a reward that is not finite."""
    scored = [(item, item.reward) for item in rollouts if item.reward is not None]
    spread = group_advantages([reward for _, reward in scored], [uid] * len(scored), "dr_grpo").has_spread
    trains = flat_trains or any(spread)
    made = []
    for item, reward in scored:
        built = item.samples.samples
        rows = built[-1:] if validate else built if trains else ()
        for index, sample in enumerate(rows or (_placeholder(item.samples.rollout_id),)):
            label = _label(uid, item, reward, sample)
            fields = {**_fields(sample, reward, uid if validate else str(label), step), **besides(sample)}
            made.append((f"{uid}_{item.session}_{index}", fields, _tag(sample, rows or built, step)))
    keys, fields_, tags = zip(*made, strict=True) if made else ((), (), ())
    return Rows(keys, fields_, tags)


def mini_batch_rows(rows: int, group_size: int, mini_batches: int, dp: int) -> int:
    """verl's `ppo_mini_batch_size` (in groups of `group_size` rows) with which `rows` rows take no more than
    `mini_batches` optimizer steps on `dp` ranks. They take exactly as many once they are padded to that times
    `group_size` times `mini_batches`."""
    unit = math.lcm(group_size, dp)
    return max(1, math.ceil(rows / (unit * mini_batches))) * unit // group_size


def spread_rows(trains: Sequence[bool], mini_batches: int) -> list[int]:
    """An order of padded rows (as many as a multiple of `mini_batches`) that deals those with a gradient out evenly: a
    mini-batch of nothing but padding would still move the weights by the optimizer's momentum."""
    order = sorted(range(len(trains)), key=lambda row: not trains[row])
    return [row for mini in range(mini_batches) for row in order[mini::mini_batches]]


def _placeholder(rollout_id: str) -> Sample:
    nothing = np.zeros(2, np.int32)
    return Sample(rollout_id, nothing, nothing.astype(np.bool_), nothing.astype(np.float32), nothing - 1, 1, ())


def _label(uid: str, item: ScoredSamples, reward: float, sample: Sample) -> Label:
    return Label(
        group=uid,
        session=item.session,
        samples=len(item.samples.samples),
        tokens=item.samples.report.trained_tokens,
        row_tokens=int(np.count_nonzero(sample.mask)),
        length=sample.ids.size - sample.prompt_len,
        reward=reward,
    )


def _fields(sample: Sample, reward: float, uid: str, step: int) -> dict[str, Any]:
    prompt, response = slice(None, sample.prompt_len), slice(sample.prompt_len, None)
    ids = torch.from_numpy(sample.ids.astype(np.int64))
    mask = torch.from_numpy(sample.mask[response].astype(np.int64))
    scores = torch.zeros(mask.numel())
    scores[-1] = reward
    return {
        "prompts": ids[prompt],
        "responses": ids[response],
        "input_ids": ids,
        "position_ids": torch.arange(ids.numel()),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": torch.from_numpy(sample.logprobs[response].astype(np.float32)),
        "rm_scores": scores,
        "uid": uid,
        "num_turns": len(sample.call_ids),
        "data_source": "agl",
        "extra_fields": {},
        "global_steps": step,
    }


def _tag(sample: Sample, samples: Sequence[Sample], step: int) -> dict[str, Any]:
    """`samples` tell a placeholder's policy versions. With none it is fresh: step n samples from version n - 1."""
    own = (sample,) if sample.mask.any() else samples
    versions = np.concatenate([row.updates[row.mask] for row in own]) if own else np.array([step - 1])
    return {
        "status": "success",
        "prompt_len": sample.prompt_len,
        "response_len": sample.ids.size - sample.prompt_len,
        "seq_len": sample.ids.size,
        "global_steps": step,
        "min_global_steps": max(0, int(versions.min())),
        "max_global_steps": max(0, int(versions.max())),
        "is_padding": False,
        "trained_tokens": int(np.count_nonzero(sample.mask)),
    }
