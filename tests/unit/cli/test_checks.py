from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agl_cli import checks, machine
from agl_cli.main import app
from agl_cli.project import open_project
from fakes.projects import make_model_folder, make_project
from fakes.tiny_model import make_tiny_tokenizer


def agl(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def rewrite(file: str, content: str | bytes | None) -> Callable[[Path], None]:
    """Spoil one file of a good project; None removes it."""

    def spoil(root: Path) -> None:
        if content is None:
            (root / file).unlink()
        else:
            (root / file).write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def setting(text: str) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        with (root / "agl.yaml").open("a", encoding="utf-8") as file:
            file.write(text)

    return spoil


def forget(*names: str) -> Callable[[Path], None]:
    """The project in a git repository that tracks all but these files."""

    def spoil(root: Path) -> None:
        subprocess.run(["git", "init", "-q", root], check=True)
        subprocess.run(["git", "-C", root, "add", "."], check=True)
        subprocess.run(["git", "-C", root, "rm", "-q", "--cached", *names], check=True)

    return spoil


BAD_INPUT = {
    "a script that git does not track": (
        forget("agent.py"),
        3,
        "agent.command names agent.py, which git does not track",
        "Run `git add agent.py`.",
    ),
    "an unknown section": (setting("modle: {path: x}\n"), 2, "unknown setting `modle`; did you mean `model`?", ""),
    "no YAML": (rewrite("agl.yaml", "agent: ["), 2, "is not valid YAML", "Correct the file."),
    "no agl.yaml": (rewrite("agl.yaml", None), 2, "No agl.yaml in", "Run `agl init`"),
    "no task file": (rewrite("tasks.jsonl", None), 2, "(data.train) cannot be read", "Correct data.train"),
    "an empty task file": (rewrite("tasks.jsonl", "\n"), 2, "holds no task", "one JSON object a line"),
    "a malformed line": (
        rewrite("tasks.jsonl", '{"id": 1, "question": "x", "answer": "y"}\n{"id": 2,\n'),
        2,
        "Line 2 of",
        "Write one JSON object a line.",
    ),
    "a task without the command's field": (
        rewrite("tasks.jsonl", '{"id": "a", "answer": "y"}\n'),
        2,
        "Task a has no field `question`, which agent.command names",
        "Correct the name",
    ),
    "no reward file": (rewrite("reward.py", None), 2, "does not exist", "Write it, or correct the path."),
    "a reward file with a syntax error": (
        rewrite("reward.py", "def reward(:\n"),
        2,
        "The reward function reward.py:reward: it raised",
        "`agl doctor` checks it",
    ),
    "a reward file without the function": (rewrite("reward.py", "x = 1\n"), 2, "defines no function `reward`", ""),
    "a model folder without weights": (
        rewrite("model/model.safetensors", None),
        2,
        "holds no safetensors file",
        "",
    ),
    "weights that are none": (rewrite("model/model.safetensors", b"<html>"), 2, "is no safetensors file", ""),
    "a config that is no JSON": (rewrite("model/config.json", "{"), 2, "config.json is no JSON object", "again"),
    "a model folder without a config": (rewrite("model/config.json", None), 2, "holds no config.json", "Hugging Face"),
    "no tokenizer": (rewrite("model/tokenizer.json", None), 2, "holds no tokenizer", "again"),
    "no chat template": (rewrite("model/chat_template.jinja", None), 2, "has no chat template", "instruction-tuned"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_before_anything_starts(tmp_path: Path, name: str) -> None:
    spoil, code, what, fix = BAD_INPUT[name]
    root = make_project(tmp_path / "project")
    spoil(root)
    result = agl("up", "--project", str(root))
    assert (result.exit_code, result.stdout) == (code, "")
    assert what in result.stderr
    assert fix in result.stderr
    assert result.stderr.count(what) == 1
    assert "Traceback" not in result.stderr
    assert not (root / ".agl" / "run").exists()


BAD_SETTINGS = {
    "a model folder that is not there": ("model.path=nope", 2, "There is no folder"),
    "a program that is not there": ("agent.command=nosuchagent {question}", 3, "`nosuchagent`, which was not found"),
    "a script that is not there": ("agent.command=./gone.sh", 3, "`./gone.sh`, which was not found"),
    "a program's script that is not there": ("agent.command=python gone.py", 3, "runs gone.py, which is not there"),
    "open quotes": ("agent.command='\"python'", 2, "cannot be split into arguments"),
    "an unknown key": ("train.group_sise=4", 2, "unknown setting `train.group_sise`; did you mean `train.group_size`?"),
    "a value of the wrong kind": ("train.steps=many", 2, "--set train.steps: `train.steps`: Input should be a valid"),
    "a value out of range": ("train.group_size=1", 2, "greater than or equal to 2"),
    "no value": ("train.steps", 2, "--set train.steps names no value"),
    "no YAML value": ("train.steps=[", 2, "'[' is no YAML value"),
    "no GPU": ("train.device=cuda", 3, "no NVIDIA GPU was found"),
    "a worktree without git": ("agent.workspace=worktree", 3, "is in no git repository"),
    "a foreign server to train": ("model.endpoint=http://127.0.0.1:9/v1", 2, "whose weights are not agl's to train"),
    "no endpoint URL": ("model.endpoint=nonsense", 2, "begins with http:// or https:// and a host"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_a_bad_setting_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    item, code, what = BAD_SETTINGS[name]
    monkeypatch.setattr(machine, "find_gpu", lambda: None)
    result = agl("up", "--project", str(make_project(tmp_path / "project")), "--set", item)
    assert (result.exit_code, result.stdout) == (code, "")
    assert what in result.stderr


def test_files_that_no_workspace_would_hold_are_told(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    forget("tasks.jsonl")(root)
    for name in ("helper.py", "ignored.py"):
        (root / name).touch()
    (root / ".gitignore").write_text("ignored.py\ntasks.jsonl\n", encoding="utf-8")
    with pytest.raises(checks.Doubt, match=r"without \.gitignore, helper\.py\. Run `git add`"):
        checks.workspace(open_project(root))
    subprocess.run(["git", "-C", root, "add", "."], check=True)
    assert checks.workspace(open_project(root)).startswith("a copy of the folder's ")


@pytest.mark.parametrize(("file", "code"), [("val.jsonl", 0), ("null", 2)])
def test_only_a_measurement_needs_validation_tasks(tmp_path: Path, file: str, code: int) -> None:
    project = open_project(make_project(tmp_path / "project"), [f"data.val={file}"])
    assert checks.require(project, checks.EVALUATION) == code
    assert checks.require(project, checks.SCORING) == 0


def test_several_failures_are_all_shown(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    (root / "val.jsonl").write_text("", encoding="utf-8")
    (root / "model" / "tokenizer.json").unlink()
    result = agl("up", "--project", str(root))
    assert result.exit_code == 2
    assert "val.jsonl (data.val) holds no task" in result.stderr
    assert "holds no tokenizer" in result.stderr


def test_what_agl_alone_reads_is_not_missed_in_workspaces_and_withheld_files_are_not_counted(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    forget("agl.yaml", "reward.py", "tasks.jsonl")(root)
    assert checks.workspace(open_project(root)) == "a copy of the folder's 1 file"


def test_a_missing_requirement_of_agl_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["pydantic<3,>=2", "no-such.thing>=1; sys_platform != 'win32'", 'other>=1; extra == "embedded"']
    monkeypatch.setattr(checks.metadata, "requires", lambda name: required)
    result = agl("run", "--project", str(make_project(tmp_path / "project")), "--policy", "model")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "agl needs no-such.thing, not installed here.\n  Run pip install no-such.thing." in result.stderr


@pytest.mark.parametrize(
    "command", [["sh", "-c", "nosuchagent {question}"], ["sh", "-c", 'exec "$@" -c x=1', "sh", "nosuchagent", "exec"]]
)
def test_a_script_whose_program_is_missing_is_told(tmp_path: Path, command: list[str]) -> None:
    project = open_project(make_project(tmp_path / "project"), [f"agent.command={json.dumps(command)}"])
    (finding,) = checks.examine(project, {"agent": checks.agent_command})
    assert finding.state == "warning"
    assert finding.what == "agent.command's script starts `nosuchagent`, which was not found."


@pytest.mark.parametrize("script", ["cd sub && x", "A=1 x", '"$0" {question}', "python agent.py"])
def test_a_script_that_starts_what_the_shell_knows_is_in_order(tmp_path: Path, script: str) -> None:
    project = open_project(make_project(tmp_path / "project"), [f"agent.command={json.dumps(['sh', '-c', script])}"])
    assert checks.agent_command(project).endswith("/sh")


def test_a_harness_that_asks_for_more_than_the_served_context_is_told(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    (root / "model" / "config.json").write_text('{"max_position_embeddings": 1024}', encoding="utf-8")
    command = 'agent.command=["claude", "-p", "{question}"]'
    with pytest.raises(checks.Doubt, match="asks for 32000 tokens an answer, but 1024 are served"):
        checks.context(open_project(root, [command]))
    assert checks.context(open_project(root, [command, "model.context=65536"])) == "65536 tokens"
    assert checks.context(open_project(root)) == "1024 tokens"
    foreign = open_project(root, [command, "model.endpoint=http://127.0.0.1:9/v1"])
    assert checks.context(foreign) == "not known here"


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = agl("up", "--project", str(root), "--set", f"gateway.port={port}")
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"cannot listen on port {port} of 127.0.0.1: Address already in use" in result.stderr
    assert "set gateway.port to 0" in result.stderr


def test_a_dead_model_server_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    root = make_project(tmp_path / "project", {"model": {"endpoint": f"http://127.0.0.1:{port}/v1"}})
    result = agl("run", "--project", str(root))
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"The model server at http://127.0.0.1:{port}/v1 does not answer" in result.stderr
    assert "Start it, or correct model.endpoint." in result.stderr


def test_a_silent_model_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        root = make_project(tmp_path / "project", {"model": {"endpoint": endpoint}})
        result = agl("run", "--project", str(root))
    assert result.exit_code == 3
    assert f"The model server at {endpoint} does not answer: timed out" in result.stderr


def test_too_large_a_policy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda: None)
    root = make_project(tmp_path / "project")
    make_model_folder(root / "model", (10**6, 10**6))
    result = agl("up", "--project", str(root))
    assert result.exit_code == 3
    assert "Training 1e+03 B parameters needs about" in result.stderr
    assert "Choose a smaller model.path" in result.stderr


def test_missing_packages_are_named_with_the_way_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "EMBEDDED", ("torch", "nosuchpackage"))
    result = agl("up", "--project", str(make_project(tmp_path / "project")))
    assert result.exit_code == 3
    assert "Not installed: nosuchpackage." in result.stderr
    assert 'pip install "agl[embedded]"' in result.stderr


def test_doctor_is_ready_for_a_good_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda: None)
    result = agl("doctor", "--project", str(make_project(tmp_path / "project")), "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0, result.stdout
    assert found["ready"] is True
    assert [check["name"] for check in found["checks"]] == ["agl.yaml", *checks.ALL]
    by_name = {check["name"]: check for check in found["checks"]}
    assert set(by_name["model"]) == {"name", "state", "what", "fix"}
    assert by_name["gpu"]["what"] == "none: the policy is trained on the CPU"
    assert "1 k parameters on the CPU: about" in by_name["training"]["what"]
    assert "Without a GPU this machine" in by_name["training"]["what"]


def test_doctor_asks_nothing_of_training_where_a_foreign_server_serves(tmp_path: Path) -> None:
    project = open_project(make_project(tmp_path / "project"), ["model.endpoint=http://127.0.0.1:9/v1"])
    assert set(checks.ALL) - set(checks.all_for(project)) == {"training tasks", "gpu", "training", "isolation"}


def test_doctor_names_every_failure_with_its_remedy(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    (root / "reward.py").write_text("import nothing_of_the_kind\n", encoding="utf-8")
    (root / "tasks.jsonl").unlink()
    result = agl("doctor", "--project", str(root))
    assert result.exit_code == 3
    assert "failed   reward            The reward function reward.py:reward: it raised ModuleNotFound" in result.stdout
    assert "failed   training tasks" in result.stdout
    assert result.stdout.endswith("Not ready.\n")


def test_a_script_in_the_command_is_not_taken_for_a_path(tmp_path: Path) -> None:
    script = f"echo {'x' * 300}"
    project = open_project(make_project(tmp_path / "project"), [f"agent.command={json.dumps(['sh', '-c', script])}"])
    (finding,) = checks.examine(project, {"workspace": checks.workspace})
    assert finding.state == "ok"


def test_doctor_without_a_project_says_how_to_get_one(tmp_path: Path) -> None:
    result = agl("doctor", "--json")
    assert result.exit_code == 3
    (only,) = json.loads(result.stdout)["checks"]
    assert (only["name"], only["state"]) == ("agl.yaml", "failed")
    assert only["fix"] == "Run `agl init` in your agent's folder first."


def test_doctor_says_where_agents_are_not_separated(tmp_path: Path) -> None:
    project = open_project(make_project(tmp_path / "project"), ["agent.isolation=off"])
    (finding,) = checks.examine(project, {"isolation": checks.isolation})
    assert finding.state == "warning"
    assert "no security boundary" in finding.what


def test_doctor_tries_warm_starts_and_says_why_there_are_none(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    for modules, state, what in (
        ("false", "ok", "off: every agent starts an interpreter of its own"),
        ("true", "ok", "Python, ready in"),
        ("[colorsys]", "ok", "colorsys, ready in"),
        ("[absent]", "warning", "agents start cold: importing absent failed: ModuleNotFoundError"),
    ):
        (finding,) = checks.examine(open_project(root, [f"agent.warm={modules}"]), {"warm": checks.warm_starts})
        assert (finding.state, finding.what[: len(what)]) == (state, what)


def test_a_gpu_is_known_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\n", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert machine.find_gpu() == machine.Gpu("NVIDIA H200", 143771 * 2**20)


@pytest.mark.parametrize("script", ["exit 1", "echo nonsense", "echo", "echo 'name, many'"])
def test_a_driver_that_fails_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert machine.find_gpu() is None


def save_template(folder: Path, template: str) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def test_doctor_names_the_remedy(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    project = open_project(root)
    save_template(
        root / "model", "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}"
    )
    (finding,) = checks.examine(project, {"chat template": checks.chat_template})
    assert (finding.state, finding.what) == (
        "warning",
        "it writes what stands before an answer anew once the answer is there; it writes earlier turns anew when the "
        "user speaks again.",
    )
    assert finding.fix.startswith("Use a chat template that leaves earlier turns as they were")


def test_a_template_that_refuses_the_conversation_is_told(tmp_path: Path) -> None:
    root = make_project(tmp_path / "project")
    project = open_project(root)
    save_template(root / "model", "{{ raise_exception('no system messages') }}")
    (finding,) = checks.examine(project, {"chat template": checks.chat_template})
    assert finding.state == "warning"
    assert "The chat template refuses these messages: no system messages." in finding.what


def test_the_template_of_a_foreign_server_is_not_tried(tmp_path: Path) -> None:
    project = open_project(make_project(tmp_path / "project"), ["model.endpoint=http://127.0.0.1:9/v1"])
    (finding,) = checks.examine(project, {"chat template": checks.chat_template})
    assert (finding.state, finding.what) == ("ok", "the model server's own, not tried")
