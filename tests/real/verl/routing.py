"""In verl's environment: `python routing.py FOLDER OUTPUT` trains a tiny Qwen3-MoE, made there, by recorded experts.

Two rollouts, one of two calls, go the way of recorded calls: the model server's answers, the compact form, samples,
rows. verl's own worker (the FSDP engine) takes the gradient of one step, in a batch that is padded and in one that is
packed. Saves by case the `logprobs` of the first row and the `gradient`: `recomputed` by verl's own engine, `own` and
`other` by agl's with the experts that the model chooses and with others, and `.._plain` for the two by transformers
alone, whose routers are written anew here.
"""

from __future__ import annotations

import base64
import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_from_nested

from agl_runtime import calls
from agl_runtime.calls import CallInfo, PackedCall, VersionSpan, ids_array, make_delta, new_routing
from agl_runtime.config import Config
from agl_runtime.errors import TrainerError
from agl_runtime.gateway.capture import read_answer
from agl_runtime.samples.build import build_samples
from agl_runtime.samples.types import Limits
from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer.backends.verl.compose import compose
from agl_runtime.trainer.backends.verl.families import Family, read_family
from agl_runtime.trainer.backends.verl.routing import routed_only, routing_field
from agl_runtime.trainer.backends.verl.rows import ScoredSamples, group_rows
from agl_runtime.trainer.backends.verl.settings import REPLAY, Paths, overrides
from fakes.tiny_model import make_tiny_tokenizer

LAYERS, EXPERTS, CHOSEN = 3, 6, 2
CONVERSATIONS = ([([5, 6, 7], [8, 9]), ([5, 6, 7, 8, 9, 10, 11], [12, 13, 14])], [([5, 6, 20], [21, 22, 23, 24])])
ADVANTAGES = (1.0, -0.5)
Experts = Mapping[tuple[int, ...], np.ndarray]
"""By the ids of a row, [T, layers, k]."""


def main(folder: Path, output: Path) -> None:
    torch.set_num_threads(1)
    make(folder)
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    traces = [(*turns[-1][0], *turns[-1][1]) for turns in CONVERSATIONS]
    own = {ids: chosen_by(model, ids) for ids in traces}
    other = {ids: (experts + 1) % EXPERTS for ids, experts in own.items()}
    rows = {name: rows_of(folder, experts) for name, experts in {"own": own, "other": other}.items()}
    found: dict[str, Any] = {
        f"{name}_plain": plain(model, experts) for name, experts in (("own", own), ("other", other))
    }
    found["recomputed"] = step(started(folder, packed=False), without_routing(rows["own"]))
    for packed in (False, True):
        worker = started(folder, packed=packed, external_lib=REPLAY)
        for name in ("own", "other"):
            found[f"{name}_packed" if packed else name] = step(worker, rows[name])
        found[f"after_packed{packed}"] = step(worker, without_routing(rows["own"]))
    found["as_verls"] = all(is_as_verls(row, own) for row in rows["own"])
    found["dense"] = refusal(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)])}))
    torch.save(found, output)


def make(folder: Path) -> None:
    tokenizer = make_tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
        num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float()
    for router in routers_of(model):
        nn.init.normal_(router.weight, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def routers_of(model: nn.Module) -> list[Qwen3MoeTopKRouter]:
    return [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]


def chosen_by(model: nn.Module, ids: Sequence[int]) -> np.ndarray:
    seen: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda *call: seen.append(call[2][2])) for router in routers_of(model)]
    with torch.no_grad():
        model(input_ids=torch.tensor([list(ids)]))
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy()


def rows_of(folder: Path, experts: Experts) -> Sequence[Mapping[str, Any]]:
    """The fields of the rows of a group whose calls a model server answered with these experts."""
    shape = read_family(folder).routing
    assert shape == (LAYERS, CHOSEN)
    scored = []
    for session, turns in enumerate(CONVERSATIONS):
        recorded = calls.decode(calls.encode("r", "0", list(packed_calls(turns, experts)), reward=float(session)))
        built = routed_only(build_samples(recorded, Limits(100, 100)), shape)
        scored.append(ScoredSamples(session, float(session), built))
    return group_rows("g", scored, 1, besides=lambda sample: routing_field(sample, shape)).fields


def is_as_verls(row: Mapping[str, Any], experts: Experts) -> bool:
    """Whether a row's experts are what verl's own agent loops would write."""
    prompt, response = row["prompts"].tolist(), row["responses"].tolist()
    theirs = AgentLoopOutput(
        prompt_ids=prompt, response_ids=response, response_mask=[1] * len(response), metrics=AgentLoopMetrics(),
        routed_experts=experts[(*prompt, *response)][:-1],
    ).as_dict()["routed_experts"]  # fmt: skip
    return theirs.dtype == row["routed_experts"].dtype and torch.equal(theirs, row["routed_experts"])


def packed_calls(turns: Sequence[tuple[list[int], list[int]]], experts: Experts) -> Iterator[PackedCall]:
    whole, base, before = experts[(*turns[-1][0], *turns[-1][1])], None, ids_array([])
    for number, (prompt, sampled) in enumerate(turns):
        answer = read_answer(answered(prompt, sampled, whole[: len(prompt) + len(sampled) - 1]))
        delta = make_delta(answer.prompt_ids, base, calls.common_prefix(answer.prompt_ids, before))
        info = CallInfo(
            str(number), "r", "0", number, "chat", committed=True, commit_seq=number, delivered=True, trainable=True
        )
        spans = (VersionSpan(0, len(sampled), PolicyVersion(0, 0)),)
        routing = new_routing(answer.routed, delta, whole.shape[1:])
        yield PackedCall(info, delta, answer.sampled_ids, answer.logprobs, spans, routing)
        base, before = str(number), np.concatenate([answer.prompt_ids, answer.sampled_ids])


def answered(prompt: Sequence[int], sampled: Sequence[int], experts: np.ndarray) -> dict[str, Any]:
    file = io.BytesIO()
    np.save(file, experts.astype(np.uint8))
    choice = {
        "message": {"role": "assistant", "content": ""},
        "finish_reason": "stop",
        "token_ids": list(sampled),
        "logprobs": {"content": [{"logprob": -1.0} for _ in sampled]},
        "routed_experts": base64.b64encode(file.getvalue()).decode(),
    }
    return {"prompt_token_ids": list(prompt), "choices": [choice]}


def without_routing(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [{name: value for name, value in row.items() if name != "routed_experts"} for row in rows]


def started(folder: Path, *, packed: bool, external_lib: str | None = None) -> ActorRolloutRefWorker:
    """A worker whose weights stay, and which keeps the gradients of its steps."""
    train = {"backend": "verl", "device": "cpu"}
    config = Config.model_validate({"agent": {"command": "run"}, "train": train})
    paths = Paths(folder, folder / "checkpoints", folder / "setup.json", False)
    made = compose(overrides(config, paths, Family("qwen3_moe", None, None, context=512), on_cpu=True))
    made.actor_rollout_ref.model.external_lib = external_lib
    made.actor_rollout_ref.model.use_remove_padding = packed
    made.actor_rollout_ref.actor.optim.lr = 0.0
    made.actor_rollout_ref.actor.optim.clip_grad = math.inf
    worker = ActorRolloutRefWorker(config=made.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def step(worker: ActorRolloutRefWorker, fields: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    data = batch(fields)
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False)
    logprobs = response_from_nested(worker.compute_log_prob(data)["log_probs"], data["response_mask"]).unbind()
    gradients: dict[str, Tensor] = {}
    engine = worker.actor.engine
    hook = engine.optimizer.register_step_pre_hook(lambda *_: gradients.update(gradient_of(engine.module)))
    rows = [
        {**row, "old_log_probs": old, "advantages": torch.full_like(row["rm_scores"], value)}
        for row, old, value in zip(fields, logprobs, ADVANTAGES, strict=True)
    ]
    more = {"global_batch_size": 2, "mini_batch_size": 2, "epochs": 1, "seed": 0, "calculate_entropy": False}
    lengths = [int(row["input_ids"].numel()) for row in fields]
    worker.update_actor(batch(rows, dataloader_kwargs={"shuffle": False}, global_token_num=lengths, **more))
    hook.remove()
    return {"logprobs": logprobs[0].detach(), "gradient": gradients}


def batch(fields: Sequence[Mapping[str, Any]], **more: Any) -> Any:
    """Rows as TransferQueue gives them back: tensors nested, whatever their lengths."""
    data = tu.list_of_dict_to_tensordict([dict(row) for row in fields])
    for name, value in data.items():
        if isinstance(value, Tensor) and not value.is_nested:
            data[name] = torch.nested.as_nested_tensor(list(value), layout=torch.jagged)
    tu.assign_non_tensor(data, temperature=1.0, **more)
    return data


def gradient_of(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }


def plain(model: nn.Module, experts: Experts) -> dict[str, Any]:
    model.zero_grad()
    loss, first = torch.zeros(()), None
    for turns, advantage in zip(CONVERSATIONS, ADVANTAGES, strict=True):
        ids = [*turns[-1][0], *turns[-1][1]]
        with routed(model, experts[tuple(ids)]):
            logs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        taken = logs[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        first = taken[len(turns[0][0]) - 1 :].detach() if first is None else first
        for prompt, sampled in turns:
            loss = loss - advantage * taken[len(prompt) - 1 : len(prompt) + len(sampled) - 1].sum()
    loss.backward()
    return {"logprobs": first, "gradient": gradient_of(model)}


@contextmanager
def routed(model: nn.Module, experts: np.ndarray) -> Iterator[None]:
    """Routers that weigh given experts by the softmax over all of them, normalised to one."""

    def forward_of(router: Qwen3MoeTopKRouter, chosen: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
            weights = torch.softmax(logits, -1)[torch.arange(len(chosen))[:, None], chosen]
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        return forward

    routers = routers_of(model)
    for layer, router in enumerate(routers):
        router.forward = forward_of(router, torch.from_numpy(experts[:, layer].astype(np.int64)))
    yield
    for router in routers:
        del router.forward


def refusal(model: nn.Module) -> str:
    from agl_runtime.trainer.backends.verl.replay import Replay

    try:
        Replay(model)
    except TrainerError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
