from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agl_runtime.errors import PreconditionError
from agl_runtime.trainer.backends.verl.cluster import handed, is_own, own


@pytest.fixture(autouse=True)
def no_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)


def made(device: str = "cuda", nodes: int = 1, **said: Any) -> SimpleNamespace:
    trainer = SimpleNamespace(nnodes=nodes, device=device, n_gpus_per_node=2)
    return SimpleNamespace(trainer=trainer, ray_kwargs=SimpleNamespace(ray_init={"num_cpus": None, **said}))


def test_a_run_on_one_machine_has_a_ray_of_its_own() -> None:
    local = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    assert is_own(made())
    assert own(made()) == local
    assert own(made("cpu", include_dashboard=True)) == local | {
        "include_dashboard": True,
        "num_cpus": 16,
        "num_gpus": 2,
    }


def test_rays_sockets_keep_out_of_a_temporary_folder_with_a_long_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/tmp/" + "t" * 32)
    assert "_temp_dir" not in own(made())
    monkeypatch.setenv("TMPDIR", "/tmp/" + "t" * 33)
    assert own(made())["_temp_dir"] == "/tmp/ray"
    assert own(made(_temp_dir="/x"))["_temp_dir"] == "/x"
    monkeypatch.setenv("RAY_TMPDIR", "/r")
    assert "_temp_dir" not in own(made())
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + "t" * 33)
    with pytest.raises(PreconditionError, match=r"The path in RAY_TMPDIR is too long for Ray's sockets\. At most 37"):
        own(made())


def test_several_machines_and_a_named_ray_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_own(made(address="10.0.0.1:6379"))
    assert not is_own(made(nodes=2))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not is_own(made())
    assert is_own(made("cpu"))


def test_processes_of_another_ray_are_handed_what_they_need_and_no_secret() -> None:
    environment = {"VERL_USE_EXTERNAL_MODULES": "plugin", "AGL_VERL_SERVER_KEY": "sesame"}
    verls = {"env_vars": {"NCCL_DEBUG": "WARN"}, "working_dir": None}
    assert handed(verls, {"working_dir": "/here"}, environment) == {
        "env_vars": {"NCCL_DEBUG": "WARN", "VERL_USE_EXTERNAL_MODULES": "plugin"},
        "working_dir": "/here",
    }
