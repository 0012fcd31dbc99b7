"""The trainer's side of Agent Lightning 1.0.2, run in its own environment: fetch rollouts, build its training batch.

Its classes do the work, unmodified. They import verl for one class alone, which carries the finished batch away; a
double of it stands in, which does less.

    python -m support.reference_trainer URL KEY MAX_PROMPT MAX_RESPONSE ROLLOUT...     says {"s", ...} on its last line
"""

from __future__ import annotations

import json
import sys
import time
import types
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DataProto:
    batch: Any
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)


def main(url: str, key: str, max_prompt: int, max_response: int, names: list[str]) -> None:
    verl = types.ModuleType("verl")
    verl.DataProto = DataProto  # type: ignore[attr-defined]
    sys.modules["verl"] = verl
    import torch
    from agentlightning.verl.agl_rollout_manager import AglRolloutManager, EnqueuedRollout
    from agentlightning.verl.rollout_adapter import RolloutAdapter

    torch.set_num_threads(1)
    manager = AglRolloutManager(agl_base_url=url, agl_key=key, model="policy", step=0)
    adapter = RolloutAdapter(
        max_prompt_length=max_prompt,
        max_response_length=max_response,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level="trajectory",
    )
    began = time.perf_counter()
    completed = []
    for number, name in enumerate(names):
        asked = EnqueuedRollout(data_id=name, rollout_id=name, step=0, sample_idx_in_step=number, enqueue_time=0.0)
        completed.append(manager._build_completed_rollout(asked, manager._get_rollout(name)))
    fetched = time.perf_counter()
    batch, _ = adapter.get_train_data_batch(completed)
    ended = time.perf_counter()
    tokens = int(batch.batch["attention_mask"].sum())
    print(
        json.dumps(
            {"fetch_and_build_s": fetched - began, "tensors_s": ended - fetched, "s": ended - began, "tokens": tokens}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
