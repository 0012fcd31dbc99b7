from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from agl_runtime.errors import ConfigError
from agl_runtime.trainer.estimate import count_parameters, estimate, memory_bytes


def write(name: str, shapes: dict[str, list[int]]) -> None:
    header = {"__metadata__": {"format": "pt"}}
    header |= {key: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for key, shape in shapes.items()}
    body = json.dumps(header).encode()
    Path("model").mkdir(exist_ok=True)
    Path("model", name).write_bytes(struct.pack("<Q", len(body)) + body)


def test_parameters_are_counted_over_all_files_from_their_headers() -> None:
    write("model-00001.safetensors", {"a": [10, 20], "b": [5]})
    write("model-00002.safetensors", {"c": [], "d": [2, 3, 4]})
    assert count_parameters(Path("model")) == 200 + 5 + 1 + 24


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0\0\0\0\0[1, 2", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_is_no_safetensors_is_named(content: bytes) -> None:
    Path("model").mkdir()
    Path("model/weights.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"weights\.safetensors is no safetensors file"):
        count_parameters(Path("model"))


def test_a_folder_without_weights_is_named() -> None:
    with pytest.raises(ConfigError, match="holds no safetensors file"):
        count_parameters(Path.cwd())


def test_the_estimate_agrees_with_the_measurements_it_rests_on() -> None:
    assert 64 <= estimate(135_000_000, 4_800, threads=1) <= 98
    assert 0.3e-3 <= estimate(100_000, 1, threads=1) <= 0.6e-3


def test_more_threads_shorten_what_the_model_takes_and_not_the_overhead() -> None:
    one, many = estimate(10**9, 100, threads=1), estimate(10**9, 100, threads=8)
    assert one / 8 < many < one / 7


def test_memory_grows_with_the_model_and_with_a_reference() -> None:
    assert memory_bytes(10**6) == 24_000_000
    assert memory_bytes(10**6, with_reference=True) == 28_000_000


def test_estimates_and_the_checks_of_a_configuration_import_nothing_heavy() -> None:
    code = (
        "import sys, agl_runtime.trainer.estimate, agl_runtime.trainer.__main__;"
        "print([name for name in ('torch', 'transformers', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
