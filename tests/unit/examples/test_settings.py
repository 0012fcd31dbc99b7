"""agl.yaml of the calculator example."""

from __future__ import annotations

from pathlib import Path

from agl_runtime.config import load_project


def test_the_settings_are_valid_and_name_files_that_exist(example: Path) -> None:
    project = load_project(example, environ={})
    config = project.config
    reward_file, _, _ = str(config.reward.function).partition(":")
    for name in (config.data.train, config.data.val, config.model.path, reward_file):
        assert name
        assert project.path(name).exists(), name


def test_a_run_stays_within_the_rollouts_that_a_demo_has_time_for(example: Path) -> None:
    train = load_project(example, environ={}).config.train
    assert train.steps * train.groups_per_step * train.group_size <= 560
