"""In verl's environment: `python replica.py POLICY OUTPUT RANKS` puts agl's rollout servers through what verl does.

Ray, verl's worker group (the actor with its rollout adapter), its server manager and its checkpoint manager are real,
composed as verl's trainer does. Writes JSON, with one entry for each server in every list:

- `asleep`, `paused`, `resumed`: HTTP statuses of a call then
- `versions` of the answers before and after an update; `gaps`: the largest difference between the log-probabilities
  that a server gave with its answer and those that verl computes, before and after
- `moved`: by how much the update changed the log-probabilities of the first answers at most
- `aborted`: calls that an abort counted with none under way, and with one
- `cut`: whether a stream ends unfinished where the server falls asleep, and where it is told to abort
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import ray
import torch
from omegaconf import DictConfig
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.utils.padding import response_from_nested

from agl_runtime.config import Config
from agl_runtime.trainer.backends.verl.compose import compose
from agl_runtime.trainer.backends.verl.families import Family
from agl_runtime.trainer.backends.verl.settings import Paths, overrides
from agl_runtime.trainer.backends.verl.setup import SERVER_KEY

CONTEXT = 4096
ASKED = {"messages": [{"role": "user", "content": "What is 12+7?"}], "seed": 1, "max_tokens": 24}
STREAM = {**ASKED, "stream": True}
MANY = {**STREAM, "n": 8, "max_tokens": CONTEXT}  # one of so many goes on for long


class Server:
    """One of verl's rollout servers, as a client sees it."""

    def __init__(self, address: str) -> None:
        headers = {"Authorization": f"Bearer {os.environ[SERVER_KEY]}"}
        self._http = httpx.Client(base_url=f"http://{address}/v1", headers=headers, timeout=60)

    def post(self, body: dict[str, Any] = ASKED) -> httpx.Response:
        return self._http.post("chat/completions", json={"model": "policy", **body})

    def answer(self) -> dict[str, Any]:
        response = self.post({**ASKED, "logprobs": True, "return_token_ids": True})
        return dict(response.raise_for_status().json())

    def is_cut(self, body: dict[str, Any], by: Any) -> bool:
        """Whether a stream that has begun does not end as it should when `by` is called."""
        with self._http.stream("POST", "chat/completions", json={"model": "policy", **body}) as response:
            lines = response.iter_lines()
            while '"content":"' not in next(lines):
                pass
            by()
            try:
                return "data: [DONE]" not in list(lines)
            except httpx.RemoteProtocolError:
                return True


class Run:
    def __init__(self, config: DictConfig, ranks: int) -> None:
        actor = RayClassWithInitArgs(
            cls=ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role="actor_rollout"
        )
        pool = RayResourcePool([ranks], use_gpu=True, max_colocate_count=1)
        self.workers = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=actor, device_name="cpu")
        self.workers.init_model()
        manager = LLMServerManager.create(config=config, worker_group=self.workers)
        engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        self.replicas = manager.get_replicas()
        self.weights = CheckpointEngineManager(config=engine, actor_wg=self.workers, replicas=self.replicas)
        self.servers = [Server(address) for address in manager.get_addresses()]

    def statuses(self) -> list[int]:
        return [server.post().status_code for server in self.servers]

    def aborted(self) -> list[int]:
        return [ray.get(replica.server_handle.aborted.remote()) for replica in self.replicas]

    def logprobs(self, answers: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
        """By verl, of each answer's sampled tokens."""
        batch = _batch(answers, calculate_entropy=False, compute_loss=False, temperature=1.0)
        found = self.workers.compute_log_prob(batch)
        return list(response_from_nested(found["log_probs"], batch["response_mask"]).unbind(0))

    def update(self, answers: Sequence[dict[str, Any]]) -> None:
        """One step that makes every answer likelier."""
        settings = {"mini_batch_size": len(answers), "global_batch_size": len(answers), "epochs": 1, "seed": 1}
        tokens = [len(_ids(answer)[0]) + len(_ids(answer)[1]) for answer in answers]
        more = {"dataloader_kwargs": {"shuffle": False}, "temperature": 1.0, "global_token_num": tokens}
        batch = _batch(answers, calculate_entropy=False, **settings, **more)
        batch["old_log_probs"] = _nested(self.logprobs(answers))
        batch["advantages"] = _nested([torch.ones(len(_ids(answer)[1])) for answer in answers])
        self.workers.update_actor(batch)


def main(policy: Path, output: Path, ranks: int) -> None:
    torch.set_num_threads(1)
    ray.init(num_cpus=4, num_gpus=ranks, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        output.write_text(json.dumps(observed(Run(configured(policy, ranks), ranks))))
    finally:
        ray.shutdown()


def configured(policy: Path, ranks: int) -> DictConfig:
    train = {"backend": "verl", "device": "cpu", "gpus": ranks}
    model = {"context": CONTEXT, "max_tokens": CONTEXT}
    config = Config.model_validate({"agent": {"command": "run"}, "train": train, "model": model})
    paths = Paths(policy, policy / "checkpoints", policy / "tasks.jsonl", None)
    made = compose(overrides(config, paths, Family("qwen3", None, None, context=CONTEXT), on_cpu=True))
    made.actor_rollout_ref.actor.optim.lr = 1e-2
    return made


def observed(run: Run) -> dict[str, Any]:
    run.weights.sleep_replicas()
    found: dict[str, Any] = {"asleep": run.statuses()}
    run.weights.update_weights(0)
    first = [server.answer() for server in run.servers]
    before = run.logprobs(first)
    run.weights.abort_replicas()
    found["paused"] = run.statuses()
    found["aborted"] = [run.aborted()]
    run.weights.sleep_replicas()
    run.update(first)
    run.weights.update_weights(1)
    run.weights.resume_generation_replicas()
    second = [server.answer() for server in run.servers]
    found["versions"] = [[_versions(answer) for answer in answers] for answers in (first, second)]
    found["gaps"] = [_gaps(first, before), _gaps(second, run.logprobs(second))]
    found["moved"] = [_gap(new, old) for new, old in zip(run.logprobs(first), before, strict=True)]
    found["cut"] = []
    for server in run.servers:
        found["cut"].append([server.is_cut(STREAM, by=run.weights.sleep_replicas)])
        run.weights.wake_up_replicas()
        found["cut"][-1].append(server.is_cut(MANY, by=run.weights.abort_replicas))
        run.weights.resume_generation_replicas()
    found["aborted"].append(run.aborted())
    found["resumed"] = run.statuses()
    return found


def _ids(answer: dict[str, Any]) -> tuple[list[int], list[int]]:
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]


def _versions(answer: dict[str, Any]) -> list[str]:
    return [span["version"] for span in answer["choices"][0]["weight_versions"]]


def _gaps(answers: Sequence[dict[str, Any]], computed: Sequence[torch.Tensor]) -> list[float]:
    said = [[token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]] for answer in answers]
    return [_gap(torch.tensor(values), found) for values, found in zip(said, computed, strict=True)]


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _batch(answers: Sequence[dict[str, Any]], **settings: Any) -> Any:
    prompts, responses = zip(*([torch.tensor(ids) for ids in _ids(answer)] for answer in answers), strict=True)
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.ones_like(ids) for ids in responses]
    fields = {
        "prompts": _nested(prompts),
        "responses": _nested(responses),
        "input_ids": _nested(whole),
        "position_ids": _nested([torch.arange(len(ids)) for ids in whole]),
        "response_mask": _nested(masks),
        "loss_mask": _nested(masks),
    }
    return tu.get_tensordict(fields, non_tensor_dict=settings)


def _nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
