"""A real vLLM server on the CPU with a tiny taught policy, whose weights can be changed while it serves.

It has flags that make its records trainable (docs/gateway.md names them) and, beside them, a model folder whose
`generation_config.json` narrows the sampling, as those of many published models do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from agl_runtime.calls import Call
from fakes.environments import locked
from fakes.tiny_model import make_tiny_policy

LOCK = Path(__file__).parents[1] / "real/vllm/requirements.txt"
CONTEXT = 8192
MODEL = "policy"
ANSWER = "The answer is 19."
QUESTION = "What is 12+7?"  # answered with a call of the calculator, and after its result with ANSWER
TWICE = "Twice, 12+7?"  # the same with two calls
TALKED_OVER = "Add 12+7, please."  # the same with a text before the call
ARGUMENTS = {
    QUESTION: ('{"expression": "12+7"}',),
    TWICE: ("{}", '{"expression": "12+7", "exact": true}'),
    TALKED_OVER: ('{"expression": "12+7"}',),
}
OPEN = "café 東京, or what?"  # nothing that the policy was taught
PLAIN = {"top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}  # else the model's own configuration holds
TOLERANCE = 1e-4  # of a log-probability, in nats: two float32 implementations of the same sums
THOUGHT = "\nadd\n"
THINKING = f"<think>{THOUGHT}</think>\n\n"  # what every answer begins with
_BEFORE_CALL = {QUESTION: "", TWICE: "", TALKED_OVER: "Let me see.\n"}
_FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"),
    *("--block-size", "32", "--logprobs-mode", "processed_logprobs"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    "--enable-server-load-tracking",
)
_ENV = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# On a CPU vLLM packs each layer's weights for oneDNN when it loads them, and goes on with those after a reload.
_PLUGIN = {
    "reloadable.py": "def register():\n    import vllm._custom_ops as ops\n\n    ops._supports_onednn = False\n",
    "reloadable-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: reloadable\nVersion: 1\n",
    "reloadable-1.dist-info/entry_points.txt": "[vllm.general_plugins]\nreloadable = reloadable:register\n",
}


@dataclass(frozen=True)
class VllmServer:
    """`folders` are the weights that it began with and others of the same form. `root` is where its own routes are."""

    root: str
    folders: tuple[Path, Path]
    http: httpx.Client = field(repr=False)

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def post(self, path: str, body: Any = None, **query: str) -> Any:
        answer = self.http.post(path, json=body, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else None

    def underway(self) -> int:
        """Requests that it has taken and not answered to their end."""
        return int(self.http.get("/load").json()["server_load"])

    def load_weights(self, folder: Path) -> None:
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    def generated(self) -> int:
        """Tokens since its start."""
        lines = self.http.get("/metrics").text.splitlines()
        (row,) = (line for line in lines if line.startswith("vllm:generation_tokens_total{"))
        return int(float(row.rpartition(" ")[2]))


@contextmanager
def vllm_server(folder: Path) -> Iterator[VllmServer]:
    folders = _policy(folder / "first", 0, ARGUMENTS), _policy(folder / "second", 1)
    with serving(folders[0], folder, "--reasoning-parser", "qwen3") as http:
        yield VllmServer(str(http.base_url), folders, http)


@contextmanager
def serving(policy: Path, folder: Path, *flags: str) -> Iterator[httpx.Client]:
    """vLLM with these weights; its log stands in `folder`."""
    python = locked(LOCK)
    for name, text in _PLUGIN.items():
        path = folder / "plugin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    port, log = _free_port(), folder / "vllm.log"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", policy, "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), *_FLAGS, *flags]
    env = {**os.environ, **_ENV, "PYTHONPATH": str(folder / "plugin")}
    with log.open("wb") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=folder, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            _await_ready(http, child, log)
            yield http
    finally:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=30)
        with suppress(ProcessLookupError):  # its engine and worker, where they outlived it
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def teacher_forced(folder: Path, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> np.ndarray:
    """Log-probabilities [S] of `sampled` after `prompt` by the weights in `folder`, in one pass of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[*prompt, *sampled]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    found = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])
    return np.asarray(found[:, 0])


def check(call: Call, folder: Path, temperature: float = 0.7) -> None:
    """Trainable, and its log-probabilities are those of the weights in `folder`."""
    assert (call.info.trainable, call.info.reason) == (True, None)
    expected = teacher_forced(folder, call.prompt_ids.tolist(), call.sampled_ids.tolist(), temperature)
    np.testing.assert_allclose(call.logprobs, expected, atol=TOLERANCE, rtol=0)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def calling(question: str) -> str:
    """What the policy was taught to say to it."""
    functions = [f'{{"name": "calculator", "arguments": {text}}}' for text in ARGUMENTS[question]]
    calls = [f"<tool_call>\n{function}\n</tool_call>" for function in functions]
    return THINKING + _BEFORE_CALL[question] + "\n".join(calls)


def _policy(folder: Path, seed: int, questions: Iterable[str] = ()) -> Path:
    """What it says to anything but these questions is open. It has as many layers as give its server the time to tell
    each token before the next one is there."""
    lessons = [lesson for question in questions for lesson in _lessons(question)]
    make_tiny_policy(folder, seed=seed, context=CONTEXT, head_dim=32, layers=8, thinks=True, lessons=lessons)
    file = folder / "generation_config.json"
    narrow = {"top_k": 2, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2, "temperature": 0.3}
    settings = json.loads(file.read_text(encoding="utf-8")) | narrow
    file.write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _lessons(question: str) -> list[tuple[list[dict[str, Any]], str]]:
    asked = user(question)
    calls = [{"function": {"name": "calculator", "arguments": text}} for text in ARGUMENTS[question]]
    said = {"role": "assistant", "content": _BEFORE_CALL[question], "reasoning_content": THOUGHT, "tool_calls": calls}
    results = [{"role": "tool", "content": "19"} for _ in calls]
    return [([asked], calling(question)), ([asked, said, *results], THINKING + ANSWER)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await_ready(http: httpx.Client, child: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at = time.monotonic() + 300
    while time.monotonic() < give_up_at and child.poll() is None:
        with suppress(httpx.TransportError):
            if http.get("/health").status_code == 200:
                return
        time.sleep(0.2)
    pytest.fail(f"vLLM did not start:\n{log.read_text(errors='replace')[-20_000:]}", pytrace=False)
