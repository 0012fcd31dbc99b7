"""Which groups make the next batch, and the hold before verl takes the device for the update.

A replay buffer of verl's, with agl's rules in place of its own: groups are whole; a group more than
`train.max_staleness` updates old is dropped, finished or not, and what still runs of it is ended; the oldest finished
ones make the batch. Groups without any reward, and batches that could teach nothing, are replaced by fresh ones. Before
a batch is handed over the gateway holds new calls and none is in flight any more, so that no call is ever aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import transfer_queue
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from agl_runtime.client import GatewayClient
from agl_runtime.trainer.backends.verl.mini_batches import into_mini_batches
from agl_runtime.trainer.backends.verl.setup import Ending, Setup
from agl_runtime.trainer.policy import hold
from agl_runtime.trainer.rollouts import RolloutDesk
from agl_runtime.trainer.schedule import cut

POLL_S = 0.1
FRUITLESS_BATCHES = 10
"""So many batches' worth of groups in a row that teach nothing end the run."""


class Waiting(NamedTuple):
    """A group under way or finished: `born` is the step that enqueued it."""

    uid: str
    born: int
    number: int
    status: str
    teaches: bool
    rollouts: tuple[str, ...]


class GroupSampler(ReplayBuffer):  # type: ignore[misc]  # verl ships no types
    """Made by verl. `sampler_kwargs` names the setup file; `refill_fn` enqueues so many fresh groups."""

    def __init__(
        self, *, trainer_config: Any, sampler_kwargs: Any, refill_fn: Callable[[int], Any], **more: Any
    ) -> None:
        super().__init__(trainer_config=trainer_config, sampler_kwargs=sampler_kwargs, refill_fn=refill_fn, **more)
        self._setup = Setup.read(sampler_kwargs.setup)
        self._train = self._setup.project.config.train
        # verl's configuration itself, from which the trainer and the estimators read the mini-batches at each step.
        self._verl = trainer_config._get_root()
        self._fruitless = 0
        self._dropped = 0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """Blocks until there is a batch. Raises RunEnded when the run is asked to end."""
        if partition_id == "val":
            return self._take("val", self._all_of("val", batch_size)), {}
        chosen = self._next_batch(global_steps, batch_size)
        batch = self._take("train", [group.uid for group in chosen])
        batch = into_mini_batches(batch, self._verl, self._train.mini_batches, self._ranks())
        ages = [global_steps - group.born for group in chosen]
        self._setup.tell(
            "batch", step=global_steps, uids=[group.uid for group in chosen], staleness=ages, dropped=self._dropped
        )
        figures = {
            "agl/staleness_mean": sum(ages) / len(ages),
            "agl/groups_dropped": float(self._dropped),
            "agl/groups_that_teach": float(sum(group.teaches for group in chosen)),
        }
        self._dropped = 0
        asyncio.run(self._hold())
        return batch, figures

    def _next_batch(self, step: int, batch: int) -> Sequence[Waiting]:
        while True:
            groups = sorted(self._waiting("train"), key=lambda group: (group.born, group.number))
            failed = [group for group in groups if group.status == "failure"]
            stale, chosen = cut(
                groups,
                batch,
                self._train.max_staleness,
                lambda group: step - group.born,
                lambda group: group.status == "finished",
            )
            if stale:
                self._drop(stale)
            elif failed:
                self._skip(step, failed)
            elif not chosen:
                self._pause()
            elif any(group.teaches for group in chosen):
                self._fruitless = 0
                return chosen
            else:
                self._skip(step, chosen)

    def _drop(self, groups: Sequence[Waiting]) -> None:
        """Too old to train on; what still runs of them is ended."""
        self._dropped += len(groups)
        self._replace("dropped", groups)
        asyncio.run(self._end(name for group in groups for name in group.rollouts))
        self.refill_fn(len(groups))

    def _skip(self, step: int, groups: Sequence[Waiting]) -> None:
        """Groups without any reward, or a batch in which no group's rewards differ, or none of those has a token to
        train: it would change nothing but by the optimizer's momentum."""
        self._replace("skipped", groups)
        self._fruitless += len(groups)
        tried = self._fruitless // self._train.groups_per_step
        if step == 1 and tried >= self._train.no_signal_steps:
            self._setup.end(Ending(kind="no_signal"))
        if tried >= FRUITLESS_BATCHES:
            self._setup.end(
                Ending(
                    kind="failed",
                    what=f"{tried} batches in a row taught nothing: no group had rewards that differ and tokens.",
                    fix="`agl rollouts ls` shows the rewards; use tasks of middling difficulty.",
                )
            )
        self.refill_fn(len(groups))

    def _replace(self, why: str, groups: Sequence[Waiting]) -> None:
        uids = [group.uid for group in groups]
        self._setup.tell(why, uids=uids)
        self._sync_metadata_from_transfer_queue()
        self._clear_groups("train", set(uids))

    def _all_of(self, partition: str, count: int) -> list[str]:
        while True:
            ended = [g.uid for g in self._waiting(partition) if g.status in ("finished", "failure")]
            if len(ended) >= count:
                return ended
            self._pause()

    def _waiting(self, partition: str) -> list[Waiting]:
        tags: Mapping[str, Mapping[str, Any]] = (transfer_queue.kv_list(partition) or {}).get(partition, {})
        return [
            Waiting(
                uid,
                tag.get("born", tag["global_steps"]),
                tag.get("number", 0),
                tag["status"],
                tag.get("teaches", False),
                tuple(tag.get("rollouts", ())),
            )
            for uid, tag in tags.items()
            if tag.get("is_prompt")
        ]

    def _pause(self) -> None:
        if ending := self._setup.ending():
            self._setup.end(ending)
        time.sleep(POLL_S)

    def _take(self, partition: str, uids: Sequence[str]) -> KVBatchMeta:
        self._sync_metadata_from_transfer_queue()
        return self._materialize_batch(partition, list(uids), dict(self.partitions[partition]))

    def _ranks(self) -> int:
        return int(self._verl.trainer.n_gpus_per_node * self._verl.trainer.nnodes)

    async def _hold(self) -> None:
        async with self._setup.client() as client:
            await hold(client, self._setup.project.config.gateway.upstream_timeout_s)
        self._setup.tell("held")

    async def _end(self, rollouts: Iterable[str]) -> None:
        async with self._setup.client() as client:
            await _desk(client, self._setup).end(rollouts)


def _desk(client: GatewayClient, setup: Setup) -> RolloutDesk:
    return RolloutDesk(client, setup.project.config.agent.timeout_s)
