"""A process that records calls without end and says on stdout what the store has acknowledged.

Arguments: the store's file, the number of concurrent tasks. Task n converses in the attempt 0 of the rollout rn; the
prompt of turn t is [n, 0, 1, ... 100 t), its answer the next 50 numbers.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

import numpy as np

from agl_runtime.schemas import RolloutCreate
from agl_runtime.store.base import Store
from agl_runtime.store.sqlite import open_store
from fakes.recorded import commit, intent


async def converse(store: Store, task: int) -> None:
    name = f"r{task}"
    for turn in itertools.count():
        call_id = f"{name}-{turn}"
        await store.begin_call(intent(call_id, [f"{name} message {i}" for i in range(turn + 1)], rollout_id=name))
        print("begun", call_id, flush=True)
        prompt = [task, *range(100 * turn)]
        sampled = range(100 * turn, 100 * turn + 50)
        await store.commit_call(commit(call_id, prompt, sampled, logprobs=np.full(50, -0.5, np.float32)))
        print("committed", call_id, flush=True)


async def main(path: Path, tasks: int) -> None:
    store = open_store(path)
    await store.add_rollouts([RolloutCreate(rollout_id=f"r{task}", input={}) for task in range(tasks)])
    await asyncio.gather(*(converse(store, task) for task in range(tasks)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
