from __future__ import annotations

from pathlib import Path

import pytest

from agl_runtime.errors import ConfigError
from agl_runtime.trainer import checks
from fakes.training import make_project

ROOT = Path("project")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"model.endpoint": "http://h/v1"}, "not agl's to train. Set model.path to a Hugging Face folder and remove"),
        ({"data.train": "null"}, "There are no training tasks. Set data.train"),
        ({"reward.function": "null"}, "Nothing gives rollouts a reward. Set reward.function"),
        ({"data.train": "nowhere.jsonl"}, "nowhere.jsonl (data.train) cannot be read"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_remedy(settings: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checks.training_tasks(make_project(ROOT, settings))
    assert complaint in str(caught.value)


def test_the_agents_own_reward_is_enough() -> None:
    project = make_project(ROOT, {"reward.function": "null", "agent.reports_reward": "true"})
    assert len(checks.training_tasks(project).tasks) == 4


def test_validation_tasks_are_optional_and_may_be_limited() -> None:
    assert checks.validation_tasks(make_project(ROOT, {"data.val": "null"})) == ()
    assert len(checks.validation_tasks(make_project(ROOT, {"eval.limit": "1"}))) == 1


def test_a_policy_is_a_folder_with_a_configuration(tmp_path: Path) -> None:
    project = make_project(ROOT)
    assert checks.policy_folder(project) == project.root / "base"
    with pytest.raises(ConfigError, match=r" \(--policy\) holds no config\.json"):
        checks.policy_folder(project, tmp_path)
    with pytest.raises(ConfigError, match=r"There is no folder gone \(--policy\)"):
        checks.policy_folder(project, Path("gone"))
    with pytest.raises(ConfigError, match=r"There is no policy\. Set model\.path"):
        checks.policy_folder(make_project(ROOT, {"model.path": "null"}))
