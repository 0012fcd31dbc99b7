"""The policy: a causal language model and its tokenizer, loaded from any Hugging Face folder onto one device.

Serving and training call the same `logits`, on the same weights object. Weights are always float32, so that small
updates are not rounded away; on a GPU a folder whose weights are 16-bit is computed in bfloat16 (autocast), on a CPU
everything is float32. Dropout is off in training too: the function that is trained is the one that was sampled from.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from agl_runtime.errors import TrainerError

# State of these layers is a growing list of keys and values; others (recurrent, chunked) cannot be batched by padding.
_BATCHABLE_LAYERS = {"full_attention", "sliding_attention"}
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError)


@dataclass(frozen=True)
class Policy:
    """`context` is the most tokens of prompt and answer together; sampling one of `stop_ids` ends an answer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    context: int
    stop_ids: frozenset[int]
    compute_dtype: torch.dtype
    forward_names: frozenset[str]

    def logits(
        self, ids: Tensor, mask: Tensor, positions: Tensor, *, cache: DynamicCache | None = None, columns: int = 0
    ) -> Tensor:
        """Next-token logits.

        `ids` and `positions` are [rows, new]; `mask` is [rows, cached + new], 1 on real tokens. The result is
        [rows, new, vocabulary], or with `columns` that of so many last ones: logits cost much where a vocabulary is
        large.
        """
        wanted: dict[str, Any] = {"position_ids": positions, "logits_to_keep": columns}
        arguments = {name: value for name, value in wanted.items() if name in self.forward_names}
        # transformers 5.40 renames `past_key_values`.
        arguments["cache" if "cache" in self.forward_names else "past_key_values"] = cache
        with torch.autocast(self.device.type, self.compute_dtype, enabled=self.compute_dtype != torch.float32):
            logits: Tensor = self.model(ids, attention_mask=mask, use_cache=cache is not None, **arguments).logits
        return logits[:, -columns:]


def load_policy(
    folder: Path,
    *,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
    context: int | None = None,
    computed_as: Path | None = None,
) -> Policy:
    """Load model and tokenizer. Raises TrainerError that names the folder or file and what is wrong with it.

    `computed_as` is the folder whose stored precision decides that of the computing, because a checkpoint is float32
    whatever it began from.
    """
    _require_files(folder)
    place = _choose_device(device)
    model: Any = _load_model(folder)
    tokenizer = _attempt(folder, "tokenizer", lambda: AutoTokenizer.from_pretrained(folder, local_files_only=True))
    _check(folder, model, tokenizer)
    half = _stored_dtype(computed_as or folder) in ("float16", "bfloat16")
    return Policy(
        model=model.to(place).eval(),
        tokenizer=tokenizer,
        device=place,
        context=_context(folder, model, context),
        stop_ids=_stop_ids(folder, model, tokenizer),
        compute_dtype=torch.bfloat16 if half and place.type == "cuda" else torch.float32,
        forward_names=frozenset(inspect.signature(model.forward).parameters),
    )


def _require_files(folder: Path) -> None:
    if not folder.is_dir():
        raise TrainerError(f"There is no model folder {folder}.", "Set model.path to a Hugging Face folder.")
    if not (folder / "config.json").is_file():
        raise TrainerError(f"{folder} has no config.json.", "Set model.path to a complete Hugging Face folder.")
    if not any(folder.glob("*.safetensors")):
        raise TrainerError(f"{folder} has no *.safetensors weights.", "Set model.path to a complete folder.")


def _choose_device(device: str) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise TrainerError("train.device is cuda, but torch finds no GPU.", "Set train.device to auto or cpu.")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def _attempt(folder: Path, what: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except _LOAD_ERRORS as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise TrainerError(f"The {what} in {folder} does not load: {reason}.", "Fetch or save it again.") from error


def _load_model(folder: Path) -> Any:
    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )

    model, info = _attempt(folder, "model", load)
    # transformers fills what a file lacks with random numbers and only warns.
    missing = sorted(info["missing_keys"])
    if missing:
        raise TrainerError(
            f"The weights in {folder} lack {len(missing)} tensors, the first is {missing[0]}.", "Fetch them again."
        )
    return model


def _check(folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or []) - _BATCHABLE_LAYERS
    if kinds:
        raise TrainerError(
            f"The model in {folder} has {', '.join(sorted(kinds))} layers, which the embedded backend cannot serve.",
            "Choose a model with attention layers only.",
        )
    if not tokenizer.chat_template:
        raise TrainerError(f"The tokenizer in {folder} has no chat template.", "Add a chat_template.jinja to it.")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise TrainerError(
            f"The tokenizer in {folder} has {len(tokenizer)} tokens, the model only {rows}.",
            "Use the tokenizer that belongs to the model.",
        )


def _context(folder: Path, model: Any, wanted: int | None) -> int:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if wanted and limit and wanted > limit:
        raise TrainerError(f"model.context is {wanted}, but the model in {folder} ends at {limit}.", "Lower it.")
    known = wanted or limit
    if not known:
        raise TrainerError(f"The model in {folder} names no context length.", "Set model.context.")
    return int(known)


def _stop_ids(folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    listed = model.generation_config.eos_token_id if model.generation_config else None
    ids = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise TrainerError(f"Neither model nor tokenizer in {folder} names an end-of-text token.", "Set eos_token.")
    return frozenset(ids)


def _stored_dtype(folder: Path) -> str | None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored: str | None = config.get("dtype", config.get("torch_dtype"))
    return stored
