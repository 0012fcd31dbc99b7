"""One rank of verl's actor, in verl's environment: `python gradients.py POLICY REFERENCE OUTPUT`, as torchrun would.

verl's own trainer methods pad and balance a batch, recompute log-probabilities, take advantages and update the actor,
on verl's own workers. Two things stand in for what needs Ray: a dictionary for TransferQueue, and a worker group that
hands each rank its part. Rank 0 writes what each optimizer step got as its gradient, and the advantages by row.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from transformers import AutoTokenizer
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.core_algos import FixedKLController
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

from agl_runtime.config import Config
from agl_runtime.trainer.backends.verl.compose import compose
from agl_runtime.trainer.backends.verl.families import Family
from agl_runtime.trainer.backends.verl.mini_batches import into_mini_batches
from agl_runtime.trainer.backends.verl.settings import Paths, overrides
from fakes.groups import rows_of
from fakes.recorded_groups import CASES, TRAIN, Case, recorded_groups


class MemoryQueue:
    """What verl's trainer asks of TransferQueue, within a process."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}
        self._tags: dict[str, dict[str, Any]] = {}

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: TensorDict, tags: Any = None) -> KVBatchMeta:
        for name, values in fields.items():
            columns = values.unbind(0) if isinstance(values, torch.Tensor) else values.tolist()
            for key, value in zip(keys, columns, strict=True):
                self._rows.setdefault(key, {})[name] = value
        self._tags.update(zip(keys, tags or (), strict=False))
        return KVBatchMeta(partition_id=partition_id, keys=list(keys), tags=[self._tags[key] for key in keys])

    def kv_batch_get(self, keys: Sequence[str], partition_id: str, select_fields: Any = None) -> TensorDict:
        rows = [self._rows[key] for key in keys]
        wanted = [name for name in select_fields or rows[0] if name in rows[0]]
        return tu.list_of_dict_to_tensordict([{name: row[name] for name in wanted} for row in rows])


class Ranks:
    """verl's worker group as this rank sees it: its part of a batch goes to its worker, outputs go to every rank."""

    def __init__(self, worker: ActorRolloutRefWorker, queue: MemoryQueue) -> None:
        self._worker = worker
        self._queue = queue
        self._size = dist.get_world_size()
        self._dispatch_info = {"actor": list(range(self._size))}

    def compute_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self._shared(batch, self._worker.compute_log_prob(self._part(batch)))

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> KVBatchMeta:
        return self._shared(batch, self._worker.compute_log_prob(self._part(batch)))

    def update_actor(self, batch: KVBatchMeta) -> dict[str, Any]:
        return {"metrics": tu.get(self._worker.update_actor(self._part(batch)), "metrics")}

    def _shared(self, batch: KVBatchMeta, output: TensorDict) -> KVBatchMeta:
        """Into the queue of every rank."""
        names = [name for name in ("log_probs", "entropy") if name in output]
        parts: list[Any] = [None] * self._size
        dist.all_gather_object(parts, [output[name].unbind(0) for name in names])
        for name, columns in zip(names, zip(*parts, strict=True), strict=True):
            rows = [{name: value} for column in columns for value in column]
            self._queue.kv_batch_put(batch.keys, batch.partition_id, tu.list_of_dict_to_tensordict(rows))
        return batch

    def _part(self, batch: KVBatchMeta) -> TensorDict:
        share = len(batch.keys) // self._size
        keys = batch.keys[dist.get_rank() * share :][:share]
        data = self._queue.kv_batch_get(keys, batch.partition_id)
        tu.assign_non_tensor(data, **batch.extra_info)
        return data


def main(policy: Path, reference: Path, output: Path) -> None:
    torch.set_num_threads(1)
    config = configured(policy)
    worker = started(config)
    # verl's own role for a reference policy pins memory, which takes a GPU.
    referee = started(configured(reference))
    steps: list[dict[str, torch.Tensor]] = []
    engine = worker.actor.engine
    engine.optimizer.register_step_pre_hook(lambda *_: steps.append(gradient_of(engine.module)))
    found = {}
    for case in CASES:
        steps.clear()
        advantages = update(config, worker, referee, policy, case)
        found[case] = {"steps": list(steps), "advantages": advantages}
    if dist.get_rank() == 0:
        torch.save(found, output)
    dist.barrier()
    dist.destroy_process_group()


def started(config: DictConfig) -> ActorRolloutRefWorker:
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def configured(policy: Path) -> DictConfig:
    """As agl configures verl, but the weights stay, so that all cases and mini-batches see the same ones."""
    train = {"backend": "verl", "device": "cpu", "tis_cap": CASES[0].tis_cap, **TRAIN}
    config = Config.model_validate({"agent": {"command": "run"}, "train": train})
    paths = Paths(policy, policy / "checkpoints", policy / "tasks.jsonl", None)
    made = compose(overrides(config, paths, Family("qwen3", None, None, context=512), on_cpu=True))
    made.actor_rollout_ref.actor.optim.lr = 0.0
    made.actor_rollout_ref.actor.optim.clip_grad = math.inf
    return made


def gradient_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return found


def update(
    config: DictConfig, worker: ActorRolloutRefWorker, referee: ActorRolloutRefWorker, policy: Path, case: Case
) -> Mapping[str, tuple[float, ...]]:
    """One step of verl's trainer over the recorded groups. Returns the plain advantages of each row's tokens."""
    queue = MemoryQueue()
    trainer_base.tq = padding_utils.tq = queue
    trainer = object.__new__(get_trainer_cls("sync"))
    trainer.config, trainer.use_critic, trainer.global_steps = config, False, 4
    trainer.tokenizer, trainer.actor_rollout_wg = AutoTokenizer.from_pretrained(policy), Ranks(worker, queue)
    trainer.ref_in_actor, trainer.ref_policy_wg = False, Ranks(referee, queue)
    trainer.kl_ctrl_in_reward = FixedKLController(case.kl_coef)
    trainer.distillation_config = None
    config.algorithm.use_kl_in_reward = case.kl_coef > 0
    config.algorithm.kl_ctrl.kl_coef = case.kl_coef
    config.algorithm.rollout_correction.rollout_is = None if case.tis_cap is None else "token"
    config.algorithm.agl = {"normalization": case.normalization, "mini_batches": case.mini_batches}
    batch = into_mini_batches(filled(queue), config, case.mini_batches, dist.get_world_size())
    metrics: dict[str, Any] = {}
    batch = trainer._balance_batch(batch, metrics)
    batch.extra_info.update(case.micro_batches)
    batch = trainer._compute_old_log_prob(batch, metrics)
    if case.kl_coef:
        batch = trainer._compute_ref_log_prob(batch, metrics)
    batch = trainer._compute_advantage(batch, metrics)
    batch.extra_info.update(case.micro_batches)
    trainer._update_actor(batch, metrics)
    rows = queue.kv_batch_get(batch.keys, "train", ["returns", "response_mask"])
    pairs = zip(batch.keys, rows["returns"].unbind(0), rows["response_mask"].unbind(0), strict=True)
    return {key: tuple(values[mask.bool()].tolist()) for key, values, mask in pairs}


def filled(queue: MemoryQueue) -> KVBatchMeta:
    made = [rows_of(uid, group) for uid, group in recorded_groups().items()]
    keys = [key for rows in made for key in rows.keys]
    fields = [field for rows in made for field in rows.fields]
    tags = [tag for rows in made for tag in rows.tags]
    return queue.kv_batch_put(keys, "train", tu.list_of_dict_to_tensordict(fields), tags)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
