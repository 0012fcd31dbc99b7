from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Lfm2Config, Lfm2ForCausalLM

from agl_runtime.errors import TrainerError
from agl_runtime.trainer.backends.embedded.policy import load_policy


@pytest.fixture
def folder(policy_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(policy_folder, tmp_path / "model"))


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def drop_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def drop_eos(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change_config(folder, eos_token_id=None)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": None}))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda f: shutil.rmtree(f), "There is no model folder"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "does not load"),
        (lambda f: change_config(f, model_type="no_such_model"), "does not load"),
        (lambda f: (f / "model.safetensors").unlink(), "has no *.safetensors weights"),
        (cut_weights, "does not load"),
        (drop_tensor, "lack 1 tensors, the first is model.norm.weight"),
        (lambda f: change_config(f, vocab_size=500), "does not load"),
        (break_tokenizer, "The tokenizer in"),
        (lambda f: (f / "chat_template.jinja").unlink(), "has no chat template"),
        (drop_eos, "names an end-of-text token"),
    ],
)
def test_a_broken_folder_is_named_with_what_is_wrong(folder: Path, damage: Callable[[Path], object], what: str) -> None:
    damage(folder)
    with pytest.raises(TrainerError) as caught:
        load_policy(folder)
    assert what in caught.value.what
    assert str(folder) in caught.value.what
    assert caught.value.fix


def test_the_context_is_the_models_unless_set_lower(folder: Path) -> None:
    assert load_policy(folder).context == 512
    assert load_policy(folder, context=100).context == 100
    with pytest.raises(TrainerError, match=r"model\.context is 600, but the model in .* ends at 512"):
        load_policy(folder, context=600)


def test_answers_end_at_every_end_token_that_model_and_tokenizer_name(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [7, 9]}))
    assert load_policy(folder).stop_ids == {2, 7, 9}


def test_sixteen_bit_weights_are_held_and_on_a_cpu_computed_in_float32(folder: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, dtype="bfloat16")
    policy = load_policy(folder)
    assert next(policy.model.parameters()).dtype == torch.float32
    assert policy.compute_dtype == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused_and_auto_takes_the_cpu(folder: Path) -> None:
    assert load_policy(folder, device="auto").device.type == "cpu"
    with pytest.raises(TrainerError, match="torch finds no GPU"):
        load_policy(folder, device="cuda")


def test_layers_that_cannot_be_batched_are_refused(folder: Path) -> None:
    config = Lfm2Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    Lfm2ForCausalLM(config).save_pretrained(folder)
    with pytest.raises(TrainerError, match="has conv layers, which the embedded backend cannot serve"):
        load_policy(folder)
