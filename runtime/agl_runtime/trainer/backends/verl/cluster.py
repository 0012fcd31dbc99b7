"""Which Ray a run has: one of its own on this machine, or that of the user, who named it or takes several machines.

Processes of our own Ray have our environment. Those of another have that of its `ray start`, so what they need is
handed to them; and verl's trainer, which reads the project's state and talks to the gateway on loopback, is kept on
this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from agl_runtime.errors import PreconditionError
from agl_runtime.trainer.backends.verl import before
from agl_runtime.trainer.backends.verl.setup import SERVER_KEY

RAY_CPUS = 16
"""What Ray is told that there are, where verl computes on the CPU."""
TMP_BYTES = 37
"""Longest path of a temporary folder in which the paths of Ray's sockets still fit into the system's 107 bytes."""


def begin(config: Any, environment: Mapping[str, str], runner: Any) -> Any:
    """Start or join Ray, unless verl is to start our own. Returns `runner`, verl's class, bound to this machine.
    Raises PreconditionError when the user's does not answer."""
    if is_own(config):
        config.ray_kwargs.ray_init = own(config)
        return runner
    before.require_answer(_named(config))
    import ray
    from omegaconf import OmegaConf
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    said: Any = OmegaConf.to_container(config.ray_kwargs.ray_init)
    theirs = get_ppo_ray_runtime_env(config)
    ray.init(**said | {"runtime_env": handed(theirs, said.get("runtime_env") or {}, environment)})
    here = ray.get_runtime_context().get_node_id()
    affinity = NodeAffinitySchedulingStrategy(here, soft=False)
    return runner.options(scheduling_strategy=affinity, num_cpus=0)  # or it would wait for a core that others have


def is_own(config: Any) -> bool:
    return config.trainer.device == "cpu" or not (_named(config) or config.trainer.nnodes > 1)


def _named(config: Any) -> str:
    return config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS", "")


def own(config: Any) -> dict[str, Any]:
    """On loopback, ended with us; `local`, or it would join the Ray of another run on this machine. Raises
    PreconditionError."""
    local = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    if config.trainer.device == "cpu":  # cores are shared by what waits most of its time, and a rank is called a GPU
        local |= {"num_cpus": RAY_CPUS, "num_gpus": config.trainer.n_gpus_per_node}
    if _is_long(os.environ.get("RAY_TMPDIR", "")):
        raise PreconditionError("The path in RAY_TMPDIR is too long for Ray's sockets.", f"At most {TMP_BYTES} bytes.")
    if "RAY_TMPDIR" not in os.environ and _is_long(os.environ.get("TMPDIR", "")):
        local |= {"_temp_dir": "/tmp/ray"}
    said = {key: value for key, value in config.ray_kwargs.ray_init.items() if value is not None}
    return {**local, **said, "address": "local"}


def _is_long(folder: str) -> bool:
    return len(os.fsencode(folder)) > TMP_BYTES


def handed(verls: Mapping[str, Any], users: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Ray's `runtime_env`. No secret is in it, because Ray logs it."""
    ours = {key: value for key, value in environment.items() if key != SERVER_KEY}
    return {**verls, **users, "env_vars": {**verls["env_vars"], **ours}}
