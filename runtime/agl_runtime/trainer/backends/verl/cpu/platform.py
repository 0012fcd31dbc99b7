"""The CPU as one of verl's platforms. A rank is a process; Ray counts ranks as GPUs, which is what verl asks it for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

NAME = "cpu"
MEMORY_BYTES = 2**34  # said where verl asks how much a device has; nothing is decided by it on a CPU


class _Device(ModuleType):
    """`torch.cpu` with the rest of what verl calls on a device's module."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name == "get_rng_state":
            return lambda *_: torch.get_rng_state()
        if name == "get_device_name":
            return lambda *_: "CPU"
        if name == "mem_get_info":
            return lambda *_: (MEMORY_BYTES, MEMORY_BYTES)
        if name.endswith(("memory_allocated", "memory_reserved")):
            return lambda *_: 0
        if name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_rng_state", "manual_seed_all"):
            return lambda *_, **__: None
        raise AttributeError(name)


class CpuPlatform(PlatformBase):  # type: ignore[misc]  # verl ships no types
    device_name = NAME
    vendor_name = NAME
    device_module = _Device("agl_cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return NAME

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def register() -> None:
    PlatformRegistry.register(platform=NAME)(CpuPlatform)
