"""verl without a GPU, for trying out and for tests: ranks are processes that compute in float32 on the CPU, and agl's
embedded engine serves in the place of vLLM. Everything else is verl's own."""

from __future__ import annotations

ROLLOUT = "agl_embedded"


def register() -> None:
    """Tell verl of the platform `cpu`, its FSDP engine, its process groups and the rollout server."""
    from agl_runtime.trainer.backends.verl.cpu import platform  # first: verl asks for its device when it is imported

    platform.register()

    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from agl_runtime.trainer.backends.verl.cpu import engine

    engine.register()
    RolloutReplicaRegistry.register(ROLLOUT, _replica)
    _ROLLOUT_REGISTRY[ROLLOUT, "async"] = f"{__name__}.replica.Adapter"


def _replica() -> type:
    # Only when verl wants it: what imports that module first has verl call `register` in the midst of it.
    from agl_runtime.trainer.backends.verl.cpu.replica import Replica

    return Replica
