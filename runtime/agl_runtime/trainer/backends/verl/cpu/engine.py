"""verl's FSDP engine, as it is, for the device `cpu`."""

from __future__ import annotations

from typing import Any

from verl.utils import distributed
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from agl_runtime.trainer.backends.verl.cpu.platform import NAME


def register() -> None:
    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=[NAME])(FSDPEngineWithLMHead)
    by_verl = distributed.initialize_global_process_group_ray

    def with_gloo(timeout_second: float | None = None, backend: str | None = None) -> Any:
        """verl joins `cpu:gloo` with the device's own backend, which would name the CPU twice."""
        return by_verl(timeout_second, backend or "gloo")

    distributed.initialize_global_process_group_ray = with_gloo
