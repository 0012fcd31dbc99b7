"""The main job as a user starts it: `agl demo`, from nothing to a trained policy, through real agent processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


def agl(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agl_cli.main", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=1500)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """The demo's folder and what it printed; one run serves all tests of this file. As in a clone of agl, the folder
    lies within a git repository that ignores it."""
    root = tmp_path_factory.mktemp("demo")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / ".gitignore").write_text("/here/\n", encoding="utf-8")
    done = agl("demo", "here", "--seed", "0", "--json", cwd=root)
    assert done.returncode == 0, done.stderr
    return root / "here", json.loads(done.stdout.splitlines()[-1])


def test_the_policy_learns(demo: tuple[Path, dict[str, object]]) -> None:
    _, found = demo
    assert found["seed"] == 0
    assert 0.15 <= float(str(found["before"])) <= 0.35
    assert float(str(found["after"])) >= 0.85
    assert found["ended"] == "complete"


def test_recorded_log_probabilities_are_those_of_a_teacher_forced_pass(demo: tuple[Path, dict[str, object]]) -> None:
    """Over every fresh token that the run trained on."""
    assert 0.0 < float(str(demo[1]["logprob_gap_max"])) < 1e-4


def test_the_checkpoint_is_a_model_folder_that_stands_alone(demo: tuple[Path, dict[str, object]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(demo[1]["checkpoint"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() > 100_000


def test_the_record_and_the_figures_are_on_disk_and_can_be_read(demo: tuple[Path, dict[str, object]]) -> None:
    folder, found = demo
    rows = [json.loads(line) for line in (folder / ".agl/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert len(steps) == found["steps"]
    assert all(row["trained_share"] > 0.9 for row in steps)
    listed = json.loads(agl("rollouts", "ls", "--json", cwd=folder).stdout)
    assert len(listed) > len(steps)


def test_the_same_command_says_that_the_run_is_complete(demo: tuple[Path, dict[str, object]]) -> None:
    folder, found = demo
    again = agl("demo", "here", "--seed", "0", "--json", cwd=folder.parent)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["checkpoint"] == found["checkpoint"]
