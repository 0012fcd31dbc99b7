"""Routing replay for verl's FSDP engine, which has none of its own; verl loads this as the model's `external_lib`.

Where rows carry `routed_experts`, every router sends each token to the experts recorded for it. How much each of them
counts is still the router's own to say, from its present logits, so the router keeps its gradient. It holds for routers
that choose by one `torch.topk` over their experts, as those of Transformers' Qwen, OLMoE, Mixtral and gpt-oss models
do; any other model is refused. A reference policy chooses for itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from verl.utils.device import get_device_name, get_vendor
from verl.utils.ulysses import slice_input_tensor
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from agl_runtime.errors import TrainerError

FIELD = "routed_experts"
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Chosen(TorchFunctionMode):
    """Within it the top `k` of scores [N, n] are those at `experts` [N, k], for a router of `n` experts."""

    def __init__(self, experts: Tensor, n: int) -> None:
        super().__init__()
        self.experts = experts
        self.uses = 0
        self._n = n

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape[-1] != self._n:
            return found
        if found.indices.shape != self.experts.shape:
            theirs, ours = list(self.experts.shape), list(found.indices.shape)
            raise TrainerError(f"Experts {theirs} are recorded for a choice of {ours}.", "Serve the model that trains.")
        self.uses += 1
        return torch.return_types.topk((args[0].gather(-1, self.experts), self.experts))


class Replay:
    """Of the routers of one model. `experts` [N, layers, k] of the tokens that the model works on next; None: the
    routers choose themselves."""

    def __init__(self, model: nn.Module) -> None:
        self.experts: Tensor | None = None
        routers = {name: module for name, module in model.named_modules() if _is_router(name, module)}
        if not routers:
            raise TrainerError("train.routing_replay finds no router in this model.", "Set it to false.")
        for name, router in routers.items():
            router.forward = self._within(int(_LAYER.findall(name)[-1]), router, router.forward)

    def _within(self, layer: int, router: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def routed(*args: Any, **kwargs: Any) -> Any:
            if self.experts is None:
                return forward(*args, **kwargs)
            with Chosen(self.experts[:, layer], router.num_experts) as chosen:
                output = forward(*args, **kwargs)
            if chosen.uses != 1:
                what = f"{type(router).__name__} does not choose its experts by one topk."
                raise TrainerError(what, "Set train.routing_replay to false, or use the Megatron engine.")
            return output

        return routed


def _is_router(name: str, module: nn.Module) -> bool:
    counts = (getattr(module, attribute, None) for attribute in ("num_experts", "top_k"))
    return bool(_LAYER.search(name)) and all(isinstance(count, int) for count in counts)


class ReplayEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's engine, with routing replay where a batch has routing."""

    def initialize(self) -> None:
        super().initialize()
        self._replay = None if self.engine_config.forward_only else Replay(self.module)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[Any, Any]:
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self._replay is not None:
            routed = micro_batch.get(FIELD, None)
            self._replay.experts = None if routed is None else self._laid(routed, inputs, output_args)
        return inputs, output_args

    def _laid(self, routed: Tensor, inputs: Mapping[str, Tensor], output_args: Mapping[str, Any]) -> Tensor:
        """[N, layers, k] in the order in which the routers see the tokens of this rank; padding goes to the first
        experts, where nothing comes of it."""
        rows = [row.long() for row in routed.unbind()]
        ids = inputs["input_ids"]
        if inputs["attention_mask"] is not None:  # [rows, longest]
            return torch.cat([_padded(row, ids.shape[1]) for row in rows])
        packed = torch.cat(rows)
        packed = _padded(packed, packed.shape[0] + int(output_args["pad_size"]))
        return slice_input_tensor(packed, dim=0, padding=False) if self.use_ulysses_sp else packed


def _padded(row: Tensor, length: int) -> Tensor:
    return torch.cat([row, row.new_zeros((length - row.shape[0], *row.shape[1:]))])


# Of a device's engines verl prefers its vendor's; its own are nobody's.
EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=get_device_name(), vendor=get_vendor()
)(ReplayEngine)
