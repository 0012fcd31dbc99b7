from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agl_cli import scaffold
from agl_cli.main import app
from agl_runtime.config import load_project
from agl_runtime.controller.runners.command import split_command

AGENT = b"""import sys\r
from openai import OpenAI\r
client = OpenAI(base_url="http://x/v1", api_key="sk-mine")\r
print(sys.argv[1])\r
"""
TASK = json.dumps({"id": "1", "question": "2+2?", "answer": "4"})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "agent.py").write_bytes(AGENT)
    (root / "tasks.jsonl").write_text(TASK + "\n", encoding="utf-8")
    return root


def agl(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, args)], catch_exceptions=False)


def files(root: Path) -> dict[str, bytes]:
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file() and ".agl" not in f.parts}


def test_it_writes_a_project_that_loads_and_a_reward_that_judges(root: Path) -> None:
    result = agl(root, "--yes", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "harness": "openai SDK (Python)",
        "command": ["python", "agent.py", "{question}"],
        "written": True,
        "files": ["agent.py", "agl.yaml", "reward.py"],
        "notes": ["Say which policy to improve: model.path in agl.yaml, a Hugging Face folder."],
    }
    config = load_project(root).config
    assert (config.agent.command, config.data.train) == ("python agent.py {question}", "tasks.jsonl")
    scope: dict[str, object] = {}
    exec((root / "reward.py").read_text(encoding="utf-8"), scope)
    reward = scope["reward"]
    assert reward({"answer": 4}, {"stdout": "thinking\nThe answer is 4\n"}) == 1.0  # type: ignore[operator]
    assert reward({"answer": 4}, {"stdout": "The answer is 14\n"}) == 0.0  # type: ignore[operator]
    assert reward({"answer": 4}, {"stdout": "The answer is 4.0."}) == 1.0  # type: ignore[operator]
    assert reward({"answer": "New York"}, {"stdout": "It is **new york**!"}) == 1.0  # type: ignore[operator]
    assert reward({"answer": -4}, {"stdout": "4"}) == 0.0  # type: ignore[operator]
    assert reward({"answer": 4}, {"stdout": ""}) == 0.0  # type: ignore[operator]


def test_the_diff_goes_to_stderr_without_the_key(root: Path) -> None:
    result = agl(root, "--dry-run")
    assert 'base_url=os.environ.get("OPENAI_BASE_URL") or "http://x/v1"' in result.stderr
    assert "sk-mine" not in result.stderr + result.stdout
    assert files(root)["agent.py"] == AGENT
    assert not (root / "agl.yaml").exists()


def test_run_twice_it_changes_nothing(root: Path) -> None:
    agl(root, "--yes")
    first = files(root)
    result = agl(root, "--yes")
    assert "Nothing to change" in result.stderr
    assert files(root) == first


def test_undo_restores_every_byte(root: Path) -> None:
    before = files(root)
    agl(root, "--yes")
    result = agl(root, "--undo")
    assert result.stdout.splitlines() == ["Restored agent.py", "Removed agl.yaml", "Removed reward.py"]
    assert files(root) == before


def test_without_a_terminal_or_yes_it_writes_nothing_and_says_what_to_do(root: Path) -> None:
    before = files(root)
    result = agl(root)
    assert result.exit_code == 2
    assert "There is no terminal to ask on." in result.stderr
    assert "--yes" in result.stderr
    assert files(root) == before


def test_an_unknown_agent_needs_a_command(tmp_path: Path) -> None:
    result = agl(tmp_path)
    assert result.exit_code == 2
    assert "No agent that agl knows was found" in result.stderr
    (tmp_path / "x").mkdir()
    result = agl(tmp_path / "x", "--command", "./agent --task '{question} now'", "--yes")
    assert result.exit_code == 0
    assert load_project(tmp_path / "x").config.agent.command == "./agent --task '{question} now'"


def test_a_folder_or_file_that_is_missing_is_named(root: Path) -> None:
    assert "is not a folder" in agl(root / "nowhere").stderr
    result = agl(root, "--tasks", "no.jsonl")
    assert result.exit_code == 2
    assert "no.jsonl does not exist" in result.stderr


def test_an_existing_reward_function_is_used_and_another_reward_file_is_left_alone(root: Path) -> None:
    (root / "reward.py").write_text("def reward(task):\n    return 1\n", encoding="utf-8")
    assert "reward.py" not in json.loads(agl(root, "--dry-run", "--json").stdout)["files"]
    (root / "reward.py").write_text("def score(task):\n    return 1\n", encoding="utf-8")
    agl(root, "--yes")
    assert load_project(root).config.reward.function == "agl_reward.py:reward"


def test_tasks_without_an_answer_make_a_reward_that_refuses_to_judge(root: Path) -> None:
    (root / "tasks.jsonl").write_text('{"prompt": "write a poem"}\n', encoding="utf-8")
    result = agl(root, "--yes")
    assert "write in reward.py what a good outcome is" in result.stderr
    scope: dict[str, object] = {}
    exec((root / "reward.py").read_text(encoding="utf-8"), scope)
    with pytest.raises(ValueError, match="does not judge rollouts yet"):
        scope["reward"]({}, "", {}, {})  # type: ignore[operator]


def test_modules_that_are_slow_to_import_are_imported_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaffold, "modules_to_preload", lambda *_: ["openai", "openai.resources"])
    agl(root, "--yes")
    assert load_project(root).config.agent.warm == ["openai", "openai.resources"]


def test_claude_code_gets_a_headless_command_and_its_settings(root: Path) -> None:
    result = agl(root, "--command", "claude", "--yes", "--json")
    assert json.loads(result.stdout)["harness"] == "Claude Code"
    assert "must leave room in the policy's context" in result.stderr
    config = load_project(root).config
    assert config.agent.command == ("claude -p {question} --output-format json --permission-mode bypassPermissions")
    assert config.agent.env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "4096"
    assert config.agent.env["ENABLE_TOOL_SEARCH"] == "false"
    assert config.gateway.models == {"*haiku*": "side job"}


def test_a_command_with_arguments_is_kept_and_codex_is_redirected_after_them(root: Path) -> None:
    agl(root, "--command", "/opt/claude -p '{question} now'", "--yes")
    assert load_project(root).config.agent.command == "/opt/claude -p '{question} now'"
    agl(root, "--undo")
    result = agl(root, "--command", "codex exec -c model_context_window=9000 '{question} now'", "--yes")
    assert "Codex does not compact when the context overflows" in result.stderr
    words = split_command(load_project(root).config.agent.command)
    assert words[:2] + words[3:] == [
        "sh",
        "-c",
        "sh",
        "codex",
        "exec",
        "-c",
        "model_context_window=9000",
        "{question} now",
    ]
    assert words[2].startswith('exec "$@" -c model=policy -c model_provider=agl')
    assert words[2].endswith('base_url="$OPENAI_BASE_URL"')


def test_codex_alone_gets_a_headless_command(root: Path) -> None:
    agl(root, "--command", "codex", "--yes")
    words = split_command(load_project(root).config.agent.command)
    assert words[4:] == [
        "codex",
        "exec",
        "--json",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "{question}",
    ]
