"""How long a training step would take on this machine's CPU and what memory it needs: the order of magnitude, no torch.

A token costs 2 floating-point operations a parameter to sample and 6 to train on (forward and backward), 8 in all. A
CPU thread does FLOPS_PER_THREAD of them a second in fp32, and each token costs OVERHEAD_S besides, however small the
model. Both constants were measured with the embedded backend on one thread of a 2-core x86-64 server: a model of 135 M
parameters took 64 to 98 CPU seconds for 4,800 tokens, one of 0.1 M 0.3 to 0.6 ms a token at 8 to 32 agents. Agents'
own time is not counted. Adam in fp32 keeps weights, gradients and two moments of 4 bytes each; activations are taken as
half of that again.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from agl_runtime.errors import ConfigError

FLOP_PER_PARAMETER = 8.0
FLOPS_PER_THREAD = 6.5e10
OVERHEAD_S = 5e-4
BYTES_PER_PARAMETER = 16.0
ACTIVATIONS = 1.5
LONGEST_HEADER_BYTES = 100 * 2**20


def estimate(params: int, tokens: int, threads: int) -> float:
    """Seconds to sample and train on `tokens` tokens (of all rollouts of the step together)."""
    return tokens * (OVERHEAD_S + FLOP_PER_PARAMETER * params / (FLOPS_PER_THREAD * threads))


def memory_bytes(params: int, *, with_reference: bool = False) -> int:
    """What training needs; a reference policy for a KL penalty adds its weights."""
    return int(params * (BYTES_PER_PARAMETER * ACTIVATIONS + (4.0 if with_reference else 0.0)))


def count_parameters(folder: Path) -> int:
    """Parameters of a Hugging Face folder, from the headers of its safetensors files. Raises ConfigError."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no safetensors file.", "Save the model with `save_pretrained`.")
    return sum(size for file in files for _, size in tensors(file))


def tensors(file: Path) -> list[tuple[str, int]]:
    """Type ("F32", "BF16", ...) and number of elements of each tensor. A safetensors file begins with the length of its
    header (8 bytes, little-endian), then the header in JSON. Raises ConfigError."""
    try:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(min(length, LONGEST_HEADER_BYTES)))
        return [(entry["dtype"], math.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{file} is no safetensors file.", "Download or save the model again.") from error
