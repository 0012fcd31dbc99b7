"""Checks the verl backend on a machine with one GPU, in less than 8 minutes and without a download.

A tiny model with random weights is made on the spot, and `agl up` trains it for two steps with vLLM, synchronously and
then asynchronously on the same device, with a stdlib-only agent that talks twice. It fails with one sentence where a
step is missing, a call was not recorded whole or was cut short, the weights did not change, or what vLLM served after
the update are not the trainer's weights (by the largest difference of log-probabilities; bfloat16 and two
implementations of attention differ by some hundredths, weights that were not synchronised by far more). Prints
throughput and where the time of a step went.

    make gpu-check                              in the environment of `make setup-verl`
    python benchmarks/gpu_check.py --cpu        the same with agl's embedded engine in the place of vLLM
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from support import report

RUN_LIMIT_S = 220
MODES = {"synchronous": {}, "asynchronous": {"active_groups": 4}}
GAP = 0.25
TRAIN = {"steps": 2, "groups_per_step": 2, "group_size": 4, "lr": 3e-3, "max_prompt_tokens": 256}
CONTEXT = 512
FIGURES = ("tokens_per_s", "sample_s", "update_s", "hold_s", "logprob_gap", "seconds")
NEEDED = ("torch", "verl", "ray", "transfer_queue", "transformers")
AGENT = """
import json, os, sys, urllib.request

messages = [{"role": "user", "content": sys.argv[1]}]
for more in ("And then?", None):
    body = json.dumps({"model": "policy", "messages": messages, "max_tokens": 24}).encode()
    headers = {"Authorization": "Bearer " + os.environ["AGL_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] or ""
    print(text)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": more}]
"""
REWARD = (
    "def reward(output, **_):\n    return sum(output['stdout'].encode()) % 8 / 8\n"  # differs from rollout to rollout
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--cpu", action="store_true", help="without a GPU: agl's engine serves, nothing of vLLM is checked"
    )
    on_cpu = parser.parse_args().cpu
    require(on_cpu)
    with tempfile.TemporaryDirectory() as folder:
        found = {mode: check(Path(folder) / mode, mode, on_cpu) for mode in MODES}
    columns = ["mode", "tokens/s", "rollout s", "update s", "hold s", "logprob gap", "seconds"]
    report.table(columns, {mode: [run[name] for name in FIGURES] for mode, run in found.items()})
    worst = max(run["logprob_gap"] for run in found.values())
    report.emit("gpu_check", {**found, "versions": versions()}, {"logprob_gap": (GAP, worst < GAP)})
    return 0


def require(on_cpu: bool) -> None:
    needed = NEEDED if on_cpu else (*NEEDED, "vllm")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"{', '.join(missing)} not installed in {sys.prefix}. Run `make setup-verl`.")
    import torch

    if not on_cpu and not torch.cuda.is_available():
        fail("torch finds no GPU. Run this on a machine with one, or with --cpu for what can be checked without.")


def check(root: Path, mode: str, on_cpu: bool) -> dict[str, Any]:
    make_project(root, mode, on_cpu)
    began = time.monotonic()
    command = [sys.executable, "-m", "agl_cli.main", "up", "--project", str(root)]
    with (root / "said").open("wb") as said:
        child = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        try:
            code = child.wait(RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()  # what it started ends with it
            fail(f"{mode}: not done after {RUN_LIMIT_S} s. {tail(root)}")
    if code:
        fail(f"{mode}: agl up ended with {code}. {tail(root)}")
    steps = [line for line in read_lines(root / ".agl" / "metrics.jsonl") if line["kind"] == "step"]
    judge(mode, steps, root)
    last = steps[-1]
    return {
        "tokens_per_s": last["sampled_tokens"] / (last["sample_s"] + last["hold_s"]),
        "sample_s": last["sample_s"],
        "update_s": last["update_s"],
        "hold_s": last["hold_s"],
        "logprob_gap": max(step["logprob_gap"] or 0.0 for step in steps),
        "seconds": time.monotonic() - began,
        "gpu": gpu(),
    }


def judge(mode: str, steps: list[dict[str, Any]], root: Path) -> None:
    if len(steps) != TRAIN["steps"]:
        fail(f"{mode}: {len(steps)} of {TRAIN['steps']} steps were made. {tail(root)}")
    for step in steps:
        if step["untrained"]:
            fail(f"{mode}: calls that cannot be trained on: {step['untrained']}. See `agl rollouts show` in {root}.")
        if not step["grad_norm"] > 0:
            fail(f"{mode}: step {step['step']} had no gradient.")
        if not (step["logprob_gap"] or 0.0) < GAP:
            fail(
                f"{mode}: before step {step['step']} the served log-probabilities differ from the trainer's by "
                f"{step['logprob_gap']:.3f}: the serving engine has other weights, or other kernels."
            )
    moved = change(root / "policy", root / ".agl" / "checkpoints" / steps[0]["version"])
    if not moved > 1e-3:
        fail(f"{mode}: the first update moved the weights by {moved:.1e} of their size: nothing was learnt.")


def change(before: Path, after: Path) -> float:
    """Size of the weights' change as a share of the weights'."""
    from safetensors.torch import load_file

    old, new = (load_file(next(folder.glob("*.safetensors"))) for folder in (before, after))
    moved = sum(float((new[name].float() - old[name].float()).square().sum()) for name in old.keys() & new.keys())
    return (moved / sum(float(value.float().square().sum()) for value in old.values())) ** 0.5


def make_project(root: Path, mode: str, on_cpu: bool) -> None:
    root.mkdir()
    make_policy(root / "policy", on_cpu)
    (root / "agent.py").write_text(AGENT)
    (root / "reward.py").write_text(REWARD)
    tasks = [{"id": str(n), "question": f"Count from {n}."} for n in range(8)]
    (root / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    verl = {"actor_rollout_ref.rollout": {"gpu_memory_utilization": 0.3, "enforce_eager": True}}
    settings = {
        "agent": {"command": [sys.executable, "agent.py", "{question}"], "concurrency": 8},
        "reward": {"function": "reward.py:reward", "python": sys.executable},
        "data": {"train": "tasks.jsonl"},
        "model": {"path": "policy", "context": CONTEXT, "max_tokens": 24},
        "train": {
            "backend": "verl", **TRAIN, **MODES[mode], "max_response_tokens": 256, "token_budget": 1024,
            "device": "cpu" if on_cpu else "cuda", "verl": {} if on_cpu else verl,
        },
    }  # fmt: skip
    (root / "agl.yaml").write_text(json.dumps(settings))  # which is YAML


def make_policy(folder: Path, on_cpu: bool) -> None:
    """A Qwen3 of two layers, in sizes that GPU kernels of attention take, with the example's tokenizer and template."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    example = Path(__file__).resolve().parent.parent / "examples" / "calculator" / "policy"
    tokenizer = AutoTokenizer.from_pretrained(example)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.float32 if on_cpu else torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def versions() -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in ("torch", "verl", "vllm", "ray", "transformers"):
        if importlib.util.find_spec(name):
            found[name] = metadata.version(name)
    return found


def gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return "none"


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def tail(root: Path) -> str:
    log = root / ".agl" / "logs" / "trainer.log"
    lines = log.read_text(errors="replace").splitlines()[-15:] if log.exists() else []
    return "The end of what was said:\n" + "\n".join([*(root / "said").read_text().splitlines()[-3:], *lines])


def fail(sentence: str) -> NoReturn:
    sys.exit(f"gpu-check failed: {sentence}")


if __name__ == "__main__":
    sys.exit(main())
