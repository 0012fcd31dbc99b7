from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agl_cli import checks, machine, training, verl
from agl_cli.checks import Finding
from agl_cli.main import app
from agl_cli.project import open_project
from agl_runtime.errors import ConfigError
from fakes.projects import make_model_folder, make_project

H200 = machine.Gpu("NVIDIA H200", 141 * 2**30)
HERMES = '<tool_call>\n{"name": 1}'


@pytest.fixture
def machine_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def equip(gpus: int, **versions: str | None) -> None:
        installed = verl.PINS | (verl.ON_GPU if gpus else verl.ON_CPU) | versions
        monkeypatch.setattr(machine, "find_gpus", lambda: [H200] * gpus)
        monkeypatch.setattr(verl, "_version", lambda name: installed.get(name))

    return equip


def make(tmp_path: Path, **train: Any) -> Path:
    return make_project(tmp_path / "project", {"train": {"backend": "verl", **train}})


def agl(root: Path, *words: str) -> Result:
    return CliRunner().invoke(app, [*words, "--project", str(root)], catch_exceptions=False)


def find(root: Path, check: checks.Check) -> Finding:
    (finding,) = checks.examine(open_project(root), {"it": check})
    return finding


def test_config_show_tells_what_verl_is_told_and_what_decides_it(tmp_path: Path, machine_with: Callable[..., None]):
    machine_with(1)
    root = make(tmp_path, verl={"actor_rollout_ref.rollout": {"gpu_memory_utilization": 0.6}})
    rows = {row["setting"]: row for row in json.loads(agl(root, "config", "show", "--json").stdout)}
    lr = rows["verl: actor_rollout_ref.actor.optim.lr"]
    assert (lr["value"], lr["origin"]) == (1e-6, "train.lr")
    share = rows["verl: actor_rollout_ref.rollout.gpu_memory_utilization"]
    assert (share["value"], share["origin"]) == (0.6, "train.verl")
    assert rows["verl: critic.enable"]["origin"] == "agl"
    assert rows["verl: algorithm.agl"]["value"] == {"normalization": "rollout", "mini_batches": 1}


def test_config_show_goes_on_without_the_model(tmp_path: Path):
    result = agl(make(tmp_path), "config", "show", "--set", "model.path=absent")
    assert (result.exit_code, "verl: " in result.stdout) == (0, False)
    assert "What verl is told cannot be shown: There is no folder" in result.stderr


def test_the_embedded_backend_tells_verl_nothing(tmp_path: Path):
    result = agl(make_project(tmp_path / "project"), "config", "show")
    assert ("verl: " in result.stdout, result.stderr) == (False, "")


def test_up_shows_what_verl_is_told_before_anything_starts(tmp_path: Path, machine_with: Callable[..., None]):
    machine_with(0)
    root = make(tmp_path)
    shown = agl(root, "up", "--dry-run")
    assert shown.exit_code == 0, shown.stderr
    assert "verl: algorithm.adv_estimator = rollout_grpo\n" in shown.stderr
    assert "gpu: " not in shown.stdout
    found = json.loads(agl(root, "up", "--dry-run", "--json").stdout)
    assert found["verl"]["trainer.device"] == "cpu"
    assert found["verl"]["algorithm.adv_estimator"] == "rollout_grpo"


def test_a_run_lists_only_what_the_user_decided(
    tmp_path: Path, machine_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    async def ended(*_: object, **__: object) -> training.Outcome:
        return training.Outcome(0, None)

    machine_with(0)
    monkeypatch.setattr(training, "run_parts", ended)
    root = make(tmp_path, verl={"trainer.log_val_generations": 3})
    lines = agl(root, "up", "--set", "train.lr=0.5").stderr.splitlines()
    told = [line for line in lines if line.startswith("verl: ")]
    assert "verl: trainer.log_val_generations = 3" in told
    assert "verl: actor_rollout_ref.actor.optim.lr = 0.5" in told
    assert not [line for line in told if "GatewayManager" in line or "weight_decay" in line]
    assert told[-1].endswith(" that you did not set; `agl up --dry-run` lists all")


def test_a_setting_of_verl_that_agl_manages_ends_up_at_once(tmp_path: Path, machine_with: Callable[..., None]):
    machine_with(0)
    result = agl(make(tmp_path, verl={"trainer": {"nnodes": 2}}), "up", "--dry-run")
    assert result.exit_code == 2
    assert "train.verl sets trainer.nnodes, which agl manages." in result.stderr
    assert "Set train.nodes instead." in result.stderr


@pytest.mark.parametrize(
    ("versions", "state", "what", "fix"),
    [
        ({}, "ok", "verl 0.9.1, ray 2.52.1, ", ""),
        ({"vllm": None}, "failed", "Not installed: vllm.", "Run `make setup-verl`"),
        ({"verl": "0.8.0"}, "failed", "verl 0.8.0 is installed; agl works with 0.9.1.", "Run `make"),
        ({"ray": "2.60.0"}, "warning", "verl 0.9.1, ray 2.60.0, ", "If verl fails: Run `make"),
        ({"torch": "2.11.0+cu129"}, "ok", "verl 0.9.1, ", ""),
    ],
)
def test_the_stack_is_compared_with_the_pins(
    tmp_path: Path, machine_with: Callable[..., None], versions: dict[str, str | None], state: str, what: str, fix: str
):
    machine_with(1, **versions)
    finding = find(make(tmp_path), verl.packages)
    assert (finding.state, finding.what[: len(what)], finding.fix[: len(fix)]) == (state, what, fix)


def test_a_model_with_linear_attention_needs_the_kernel_that_keeps_samples_apart(
    tmp_path: Path, machine_with: Callable[..., None]
):
    root = make(tmp_path)
    (root / "model" / "config.json").write_text('{"model_type": "qwen3_5_moe"}', encoding="utf-8")
    machine_with(1)
    finding = find(root, verl.packages)
    assert (finding.state, finding.fix) == ("failed", "Run pip install flash-linear-attention==0.5.2.")
    assert "flash-linear-attention is not installed: without it verl lets a Qwen3.5" in finding.what
    machine_with(1, **{"flash-linear-attention": "0.5.2"})
    assert find(root, verl.packages).state == "ok"
    machine_with(0)
    assert find(root, verl.packages).state == "ok"


def test_without_a_gpu_no_vllm_is_needed_and_verl_is_for_trying_out(tmp_path: Path, machine_with: Callable[..., None]):
    machine_with(0)
    root = make(tmp_path)
    assert find(root, verl.packages).state == "ok"
    finding = find(root, checks.gpu)
    assert (finding.state, finding.what) == (
        "warning",
        "none: verl trains on the CPU, which is for trying out only.",
    )
    assert finding.fix == "Set train.backend to embedded, or use a machine with an NVIDIA GPU."
    assert find(root, checks.training).what == "1 k parameters on this machine's CPU"
    two = make(tmp_path, gpus=2)
    assert find(two, checks.training).what == "1 k parameters on this machine's CPU, in 2 processes"


@pytest.mark.parametrize(
    ("gpus", "train", "torch", "state", "what"),
    [
        (2, {"gpus": 4}, "2.13.0", "failed", "train.gpus is 4; this machine has 2 that its driver names."),
        (0, {"device": "cuda"}, "2.13.0", "failed", "train.gpus is 1; this machine has 0 that its driver names."),
        (1, {}, "2.13.0+cpu", "failed", "torch is built for the CPU, and there is a GPU."),
        (1, {"device": "cpu"}, "2.13.0", "ok", "none is used: train.device is cpu, which is for trying out"),
        (0, {"device": "cpu"}, "2.13.0", "ok", "none is used: train.device is cpu, which is for trying out"),
        (4, {"gpus": 4}, "2.13.0", "ok", "4 x NVIDIA H200, 141.0 GiB each"),
        (8, {"gpus": 8, "nodes": 2}, "2.13.0", "ok", "8 x NVIDIA H200, 141.0 GiB each, here; Ray joins 2 such nodes"),
    ],
)
def test_gpus_are_counted(
    tmp_path: Path,
    machine_with: Callable[..., None],
    gpus: int,
    train: dict[str, Any],
    torch: str,
    state: str,
    what: str,
):
    machine_with(gpus, torch=torch)
    finding = find(make(tmp_path, **train), checks.gpu)
    assert (finding.state, finding.what) == (state, what)


def test_a_model_that_hardly_fits_is_a_doubt(tmp_path: Path, machine_with: Callable[..., None]):
    machine_with(1)
    root = make(tmp_path)
    make_model_folder(root / "model", (8_000, 1_000_000))
    finding = find(root, checks.training)
    assert (finding.state, finding.what[:28]) == ("warning", "8 B parameters on 1 GPU: wei")
    assert "optimizer_offload" in finding.fix
    offloading = {"actor_rollout_ref.actor.fsdp_config": {"param_offload": True, "optimizer_offload": True}}
    machine_with(4)
    assert find(make(tmp_path, gpus=4, verl=offloading), checks.training).state == "ok"


def test_memory_of_a_gpu_is_that_of_training_or_of_serving_beside_what_rests():
    assert verl.gpu_bytes(10, 1, {}) == 160
    assert verl.gpu_bytes(10, 100, {}) == pytest.approx(10 * 12 / 100 + 20)
    assert verl.gpu_bytes(10, 100, {"actor_rollout_ref.rollout.tensor_model_parallel_size": 4}) == pytest.approx(6.2)
    told = {f"actor_rollout_ref.actor.megatron.{name}": True for name in verl.OFFLOADS}
    assert verl.gpu_bytes(10, 100, told) == 20


def test_the_tool_parser_is_that_of_the_family(tmp_path: Path, machine_with: Callable[..., None]):
    machine_with(1)
    root = make(tmp_path)
    finding = find(root, verl.tool_parser)
    assert finding.state == "warning"
    assert "no parser of vLLM for tool calls of a qwen3 model with this template" in finding.what
    assert "tool_call_parser and enable_auto_tool_choice under train.verl" in finding.fix
    (root / "model" / "chat_template.jinja").write_text(HERMES, encoding="utf-8")
    assert find(root, verl.tool_parser).what == "hermes; for reasoning none"
    assert "tool parser" in checks.all_for(open_project(root))
    assert "tool parser" not in checks.all_for(open_project(root, ["train.backend=embedded"]))


def test_settings_are_compared_with_verls_own_files_before_anything_starts(
    tmp_path: Path, machine_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    machine_with(0)
    root = make(tmp_path)
    assert find(root, verl.settings).what == "not compared with verl's own files, which are not here"

    def refuse(values: object) -> None:
        raise ConfigError("train.verl sets x, which verl does not know.", "Correct it.")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(verl, "compose", refuse)
    result = agl(root, "up", "--dry-run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: train.verl sets x, which verl does not know.\n  Correct it." in result.stderr
    assert (find(root, verl.settings).state, "verl settings" in checks.all_for(open_project(root))) == ("failed", True)


def test_settings_are_compared_while_the_model_is_still_to_be_fetched(
    tmp_path: Path, machine_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    machine_with(1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    compared: list[object] = []
    monkeypatch.setattr(verl, "compose", compared.append)
    root = make(tmp_path, verl={"trainer.log_val_generations": 3})
    shutil.rmtree(root / "model")
    assert find(root, verl.settings).what == "1 setting in train.verl, of names and kinds that verl knows"
    assert compared == [{"trainer.log_val_generations": 3}]


def test_what_the_cpu_does_not_take_of_train_verl_is_told(
    tmp_path: Path, machine_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(verl, "compose", lambda values: values)
    offload = {"actor_rollout_ref.actor.fsdp_config": {"param_offload": True, "optimizer_offload": False}}
    root = make(tmp_path, verl=offload)
    machine_with(0)
    finding = find(root, verl.settings)
    assert finding.what == "on the CPU agl decides actor_rollout_ref.actor.fsdp_config.param_offload of train.verl."
    assert (finding.state, finding.fix) == ("warning", "They count on GPUs.")
    assert f"verl settings: {finding.what}" in agl(root, "up", "--dry-run").stderr
    machine_with(1)
    assert find(root, verl.settings).state == "ok"


@pytest.mark.parametrize("command", ["demo", "up"])
def test_every_command_that_trains_asks_for_verl_first(
    tmp_path: Path, machine_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch, command: str
):
    machine_with(0, verl=None)
    monkeypatch.setattr(training, "run_parts", None)
    chosen = ["--set", "train.backend=verl"]
    words = [str(tmp_path / "demo")] if command == "demo" else ["--project", str(make_project(tmp_path / "project"))]
    result = CliRunner().invoke(app, [command, *words, *chosen], catch_exceptions=False)
    assert (result.exit_code, "Error: Not installed: verl." in result.stderr) == (3, True)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which Python imports."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def test_a_tracker_without_its_package_is_told_before_anything_starts(tmp_path: Path, packages: Path):
    (packages / "mlflow.py").write_text("raise AssertionError('a check imports no tracker')")
    (packages / "swanlab").mkdir()  # a folder that holds runs, and no package
    root = make(tmp_path, trackers=["console", "mlflow"])
    assert find(root, verl.trackers).what == "console, mlflow"
    finding = find(make(tmp_path, trackers=["console", "swanlab", "clearml", "mlflow"]), verl.trackers)
    assert (finding.state, finding.what) == ("failed", "train.trackers names swanlab, clearml, not installed here.")
    assert finding.fix == "Run pip install swanlab clearml, or change train.trackers."
    assert checks.all_for(open_project(root))["trackers"] is verl.trackers
    assert checks.training_for(open_project(root))["trackers"] is verl.trackers
