from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from agl_runtime.errors import ConfigError, PreconditionError
from agl_runtime.trainer.backends.verl.before import require_answer, require_model


def model_of(folder: Path, model_type: str = "llama", external_lib: str | None = None) -> SimpleNamespace:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return SimpleNamespace(path=str(folder), trust_remote_code=False, external_lib=external_lib)


def test_a_model_of_a_known_kind_with_whole_files_is_taken(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(9)}, tmp_path / "model.safetensors")
    require_model(model_of(tmp_path))


def test_weights_that_were_cut_off_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(999)}, file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"The model in .* does not load: .*\. Fetch or save it again\."):
        require_model(model_of(tmp_path))


def test_a_kind_of_model_that_nobody_knows_is_refused_unless_the_users_own_module_may_bring_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not load: .*`zorg`"):
        require_model(model_of(tmp_path, "zorg"))
    require_model(model_of(tmp_path, "zorg", external_lib="zorg_models"))


def test_a_cluster_that_answers_is_taken_and_so_is_what_only_ray_can_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        require_answer(f"127.0.0.1:{server.getsockname()[1]}")
    for address in ("", "auto", "local", "ray://10.0.0.1:10001"):
        require_answer(address)


def test_a_cluster_that_is_gone_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PreconditionError, match=rf"No Ray answers at 127.0.0.1:{port}: .*unset RAY_ADDRESS"):
        require_answer(f"127.0.0.1:{port}")
