"""What a configuration must hold before a trainer begins anything: each function raises ConfigError with the remedy."""

from __future__ import annotations

from pathlib import Path

from agl_runtime.config import Config, Project
from agl_runtime.errors import ConfigError
from agl_runtime.trainer.data import Task, TaskOrder, load_tasks


def training_tasks(project: Project) -> TaskOrder:
    config = project.config
    if config.model.endpoint:
        raise ConfigError(
            "model.endpoint names a server whose weights are not agl's to train.",
            "Set model.path to a Hugging Face folder and remove model.endpoint.",
        )
    if not config.data.train:
        raise ConfigError("There are no training tasks.", "Set data.train in agl.yaml to a JSON Lines file.")
    require_reward(config)
    tasks = load_tasks(project.path(config.data.train), "data.train")
    return TaskOrder(tasks, config.train.seed, config.data.shuffle)


def validation_tasks(project: Project) -> tuple[Task, ...]:
    """Empty where data.val is not set."""
    data = project.config.data
    return load_tasks(project.path(data.val), "data.val", project.config.eval.limit) if data.val else ()


def tasks_to_measure(project: Project) -> tuple[Task, ...]:
    """The validation tasks, of which there must be some."""
    tasks = validation_tasks(project)
    if not tasks:
        raise ConfigError("There are no validation tasks.", "Set data.val in agl.yaml to a JSON Lines file.")
    return tasks


def policy_folder(project: Project, policy: Path | None = None) -> Path:
    """`policy`, or else model.path."""
    if policy is None and not project.config.model.path:
        raise ConfigError("There is no policy.", "Set model.path in agl.yaml to a Hugging Face folder.")
    folder = policy or project.path(str(project.config.model.path))
    name = "--policy" if policy else "model.path"
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder} ({name}).", "Name a folder in Hugging Face layout.")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} ({name}) holds no config.json.", "Name a folder in Hugging Face layout.")
    return folder


def require_reward(config: Config) -> None:
    if not config.reward.function and not config.agent.reports_reward:
        raise ConfigError(
            "Nothing gives rollouts a reward.", "Set reward.function to file.py:name, or agent.reports_reward to true."
        )
