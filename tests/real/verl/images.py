"""In verl's environment: `python images.py FOLDER OUTPUT` trains a tiny Qwen2.5-VL, made on the spot, on what it saw.

One recorded call showed the model an image; verl's own worker (the FSDP engine) computes log-probabilities of its row
with that image, with another one, and takes an optimizer step. Writes JSON: the log-probabilities `seen` and `other`
by verl, and `plain` by transformers alone; the `fields` of the row with their shapes; the step's `grad_norm`.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import response_from_nested

from agl_runtime.config import Config
from agl_runtime.samples.types import BuildReport, RolloutSamples, Sample
from agl_runtime.trainer.backends.verl.compose import compose
from agl_runtime.trainer.backends.verl.families import Family
from agl_runtime.trainer.backends.verl.images import Eye, eye_of, row_fields, see
from agl_runtime.trainer.backends.verl.rows import ScoredSamples, group_rows
from agl_runtime.trainer.backends.verl.settings import Paths, overrides

VISION = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION]
GRID = 16  # pixels: 4 x 4 patches, of which the model makes 2 x 2 tokens


def main(folder: Path, output: Path) -> None:
    torch.set_num_threads(1)
    processor = make(folder)
    # The processor's video part needs torchvision, which no CPU build of torch here has; verl loads and binds the rest.
    AutoProcessor.from_pretrained = lambda *_, **__: processor
    eye = eye_of(folder)
    assert eye is not None
    samples = [recorded(processor.tokenizer, said) for said in ("red", "green")]
    seen, other = (rows_of(eye, samples, colour) for colour in ("red", "blue"))
    inputs = seen[0]["multi_modal_inputs"]
    found: dict[str, Any] = {
        "fields": {key: list(value.shape) for key, value in inputs.items()},
        "plain": plain(folder, samples[0], inputs),  # before verl puts its own forward pass into the model's class
    }
    worker = started(folder)
    found |= {"seen": logprobs(worker, batch(seen)), "other": logprobs(worker, batch(other))}
    output.write_text(json.dumps({**found, "grad_norm": step(worker, seen)}))


def rows_of(eye: Eye, samples: Sequence[Sample], colour: str) -> Sequence[Mapping[str, Any]]:
    """The fields of the rows of a group whose rollouts were all shown an image of one colour."""
    scored, inputs = [], {}
    for session, sample in enumerate(samples):
        tokens = int(sample.mask.sum())
        built = RolloutSamples("r", (sample,), BuildReport(1, tokens, tokens))
        built, shown = see(eye, built, {"c": messages(colour)})
        inputs |= shown
        scored.append(ScoredSamples(session, float(session), built))
    return group_rows("g", scored, 1, besides=lambda row: row_fields(eye, row, inputs[id(row)])).fields


def make(folder: Path) -> Qwen2_5_VLProcessor:
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
            "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=1024
    )
    processor = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)
    processor.check_argument_for_proper_class = lambda name, argument: None
    processor.__init__(image_processor=images, tokenizer=tokenizer, video_processor=images)
    return processor


def messages(colour: str) -> list[dict[str, Any]]:
    file = io.BytesIO()
    Image.new("RGB", (GRID, GRID), colour).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def recorded(tokenizer: PreTrainedTokenizerFast, said: str) -> Sample:
    """A call after a prompt with four image tokens, answered with a token a letter."""
    prompt = tokenizer.encode("<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>?<|im_end|>")
    ids = np.array([*prompt, *tokenizer.encode(said)], np.int32)
    mask = np.arange(ids.size) >= len(prompt)
    logprobs = np.where(mask, -1.0, 0.0).astype(np.float32)
    return Sample("r", ids, mask, logprobs, np.where(mask, 0, -1).astype(np.int32), len(prompt), ("c",))


def started(folder: Path) -> ActorRolloutRefWorker:
    train = {"backend": "verl", "device": "cpu", "lr": 1e-3}
    config = Config.model_validate({"agent": {"command": "run"}, "train": train})
    paths = Paths(folder, folder / "checkpoints", folder / "setup.json", False)
    made = compose(overrides(config, paths, Family("qwen2_5_vl", None, None, context=512), on_cpu=True))
    worker = ActorRolloutRefWorker(config=made.actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def batch(fields: Sequence[Mapping[str, Any]], **more: Any) -> Any:
    """Rows as TransferQueue gives them back: tensors nested, whatever their lengths."""
    data = tu.list_of_dict_to_tensordict([dict(row) for row in fields])
    for name, value in data.items():
        if isinstance(value, torch.Tensor) and not value.is_nested:
            data[name] = torch.nested.as_nested_tensor(list(value), layout=torch.jagged)
    tu.assign_non_tensor(data, temperature=1.0, **more)
    return data


def logprobs(worker: ActorRolloutRefWorker, data: Any) -> list[float]:
    tu.assign_non_tensor(data, calculate_entropy=False, compute_loss=False)
    output = worker.compute_log_prob(data)
    found = response_from_nested(output["log_probs"], data["response_mask"])
    return [float(value) for value in found.unbind()[0][:3]]


def plain(folder: Path, sample: Sample, inputs: dict[str, torch.Tensor]) -> list[float]:
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.from_numpy(sample.ids.astype(np.int64))[None]
    kinds = (ids == model.config.image_token_id).long()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **inputs).logits[0]
    logs = torch.log_softmax(logits, -1)[sample.prompt_len - 1 : -1]
    return [float(value) for value in logs.gather(1, ids[0, sample.prompt_len :, None])[:, 0]]


def step(worker: ActorRolloutRefWorker, fields: Any) -> float:
    rows = [
        {**row, "old_log_probs": row["rollout_log_probs"], "advantages": torch.full_like(row["rm_scores"], value)}
        for row, value in zip(fields, (1.0, -0.5), strict=True)
    ]
    more = {"global_batch_size": 2, "mini_batch_size": 2, "epochs": 1, "seed": 0, "calculate_entropy": False}
    lengths = [int(row["input_ids"].numel()) for row in fields]
    data = batch(rows, dataloader_kwargs={"shuffle": False}, global_token_num=lengths, **more)
    metrics = tu.get(worker.update_actor(data), "metrics")
    return float(np.max(metrics["grad_norm"]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
