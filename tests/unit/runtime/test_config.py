from __future__ import annotations

from pathlib import Path

import pytest

from agl_runtime.config import Config, load_project, setting_paths
from agl_runtime.errors import ConfigError

MINIMAL = "agent:\n  command: run {question}\n"


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "agl.yaml").write_text(text, encoding="utf-8")
    return tmp_path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    root = write(tmp_path, MINIMAL + "train:\n  lr: 0.1\n  steps: 7\n  group_size: 4\n")
    environ = {"AGL_CFG_TRAIN__LR": "0.2", "AGL_CFG_TRAIN__STEPS": "8"}
    project = load_project(root, overrides={"train.lr": "0.3"}, environ=environ)
    train = project.config.train
    assert (train.lr, train.steps, train.group_size, train.algorithm) == (0.3, 8, 4, "grpo")
    assert project.origins["train.lr"] == "--set train.lr"
    assert project.origins["train.steps"] == "AGL_CFG_TRAIN__STEPS"
    assert project.origins["train.group_size"] == "agl.yaml"
    assert "train.algorithm" not in project.origins


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("agnt:\n  command: x\n", r"agl\.yaml: unknown setting `agnt`; did you mean `agent`\?"),
        (MINIMAL + "  timout_s: 3\n", r"unknown setting `agent\.timout_s`; did you mean `agent\.timeout_s`\?"),
        (MINIMAL + "lr: 3\n", r"unknown setting `lr`; did you mean `train\.lr`\?"),
        ("train: {}\n", r"agl\.yaml: `agent` is missing\."),
        (MINIMAL + "train:\n  lr: fast\n", r"agl\.yaml: `train\.lr`: Input should be a valid number"),
        (MINIMAL + "train:\n  group_size: 1\n", r"`train\.group_size`: Input should be greater than or equal to 2"),
        (
            MINIMAL + "train:\n  active_groups: 7\n",
            r"`train\.active_groups`: must be at least train\.groups_per_step, which is 8",
        ),
        (MINIMAL + "  env: {AGL_KEY: x}\n", r"AGL_KEY are set by agl for each rollout"),
        (MINIMAL + "  reports_reward: true\nreward:\n  function: r.py:f\n", r"gives the reward, not both"),
        ("agent: [\n", r"agl\.yaml is not valid YAML: line 2: expected the node content"),
        ("agent: a\tb\0\n", r"agl\.yaml is not valid YAML"),
        ("- a\n", r"agl\.yaml holds no mapping"),
    ],
)
def test_what_is_wrong_is_named_with_the_nearest_known_setting(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_project(write(tmp_path, text))


def test_a_wrong_variable_or_flag_is_named_as_its_origin(tmp_path: Path) -> None:
    root = write(tmp_path, MINIMAL)
    with pytest.raises(ConfigError, match=r"AGL_CFG_TRAIN__LR: `train\.lr`: Input should be a valid number"):
        load_project(root, environ={"AGL_CFG_TRAIN__LR": "x"})
    with pytest.raises(ConfigError, match=r"--set train\.lrr: unknown setting `train\.lrr`; did you mean `train\.lr`"):
        load_project(root, overrides={"train.lrr": "1"})
    with pytest.raises(ConfigError, match=r"--set train\.betas: `train\.betas\.1`"):
        load_project(root, overrides={"train.betas": "[0.9, x]"})


def test_the_file_is_found_from_a_folder_below(tmp_path: Path) -> None:
    below = write(tmp_path, MINIMAL) / "a" / "b"
    below.mkdir(parents=True)
    assert load_project(below).root == tmp_path


def test_no_file_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No agl\.yaml in .* or above it\. Run `agl init`"):
        load_project(tmp_path)


def test_a_section_with_every_line_commented_out_means_the_defaults(tmp_path: Path) -> None:
    assert load_project(write(tmp_path, MINIMAL + "model:\n  # path: x\n")).config.model.path is None


def test_a_flag_sets_what_a_section_of_comments_leaves_open(tmp_path: Path) -> None:
    (tmp_path / "agl.yaml").write_text("agent: {command: x}\nmodel:\n  # path: m\n", encoding="utf-8")
    project = load_project(tmp_path, overrides={"model.path": "m"}, environ={})
    assert (project.config.model.path, project.origins["model.path"]) == ("m", "--set model.path")


def test_every_setting_is_documented() -> None:
    for path in setting_paths():
        section, key = path.split(".")
        field = type(getattr(Config(agent={"command": "x"}), section)).model_fields[key]  # type: ignore[arg-type]
        assert field.description, path


def test_a_secret_is_not_shown() -> None:
    config = Config.model_validate({"agent": {"command": "x"}, "model": {"api_key": "sk-1"}})
    assert "sk-1" not in repr(config)
    assert "sk-1" not in config.model_dump_json()


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("{algorithm: opo}", r"algorithm opo is none of the embedded backend's: grpo, dr_grpo, rloo\."),
        ("{backend: verl, algorithm: gae}", r"algorithm gae is none of the verl backend's: grpo, .*opo"),
        ("{gpus: 4}", r"only the verl backend has train\.gpus; remove it, or set train\.backend to verl\."),
        ("{verl: {x: 1}}", r"only the verl backend has train\.verl;"),
        ("{trackers: [wandb]}", r"only the verl backend has train\.trackers;"),
        ("{routing_replay: true}", r"only the verl backend has train\.routing_replay;"),
        ("{backend: verl, max_batch: 9}", r"only the embedded backend has train\.max_batch; remove it"),
        ("{backend: verl, trackers: [paper]}", r"train\.trackers: paper is none of console, tensorboard,"),
    ],
)
def test_what_the_backend_cannot_honour_is_refused(tmp_path: Path, train: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_project(write(tmp_path, f"{MINIMAL}train: {train}\n"), environ={})


def test_settings_of_verl_are_handed_on_nested_or_dotted(tmp_path: Path) -> None:
    root = write(tmp_path, MINIMAL + "train:\n  backend: verl\n  verl:\n    trainer.x: 1\n    trainer: {y: 2}\n")
    project = load_project(root, overrides={"train.verl.trainer.z": "3"}, environ={})
    assert project.config.train.verl == {"trainer.x": 1, "trainer": {"y": 2, "z": 3}}
