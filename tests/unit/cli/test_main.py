from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from agl_cli import diagnostics, main
from agl_cli.commands import down
from agl_runtime.errors import AglError, ConfigError, GatewayError, PreconditionError, UpstreamError

HEAVY = ("agl_runtime", "rich", "pydantic", "aiohttp", "yaml", "psutil", "numpy", "torch", "agl_cli.commands.")


def imported(*arguments: str) -> set[str]:
    """The modules that a whole process of `agl` has imported when it ends."""
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('\\n'.join(sorted(sys.modules)), file=sys.stderr))\n"
        f"sys.argv = ['agl', *{arguments!r}]\n"
        "from agl_cli.main import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
def test_help_and_version_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert [name for name in imported(*arguments) if name.startswith(HEAVY)] == []


def test_a_commands_own_help_imports_that_command_alone() -> None:
    modules = [name for name in imported("down", "--help") if name.startswith("agl_cli.commands.")]
    assert modules == ["agl_cli.commands.down"]


def test_every_command_is_listed_with_its_help() -> None:
    result = CliRunner().invoke(main.app, ["--help"], catch_exceptions=False)
    assert result.exit_code == 0
    for name, text in main.COMMANDS.items():
        assert f"  {name} " in result.stdout
        assert text in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(main.app, [name, "--help"], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"Usage: agl {name}" in result.stdout


def test_a_misspelt_command_names_the_nearest() -> None:
    result = CliRunner().invoke(main.app, ["statsu"], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "No such command 'statsu'. Did you mean 'status'" in result.stderr


def test_a_wrong_option_is_wrong_usage() -> None:
    result = CliRunner().invoke(main.app, ["down", "--nope"], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "No such option" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("It is wrong.", "Correct it."), 2),
        (PreconditionError("It is missing.", "Install it."), 3),
        (GatewayError("It is silent.", "Start it."), 1),
        (UpstreamError("It is broken.", "Repair it."), 1),
        (AglError("It failed.", "Try again."), 1),
    ],
)
def test_an_error_is_two_sentences_and_its_exit_code(
    error: AglError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    result = invoke_with(fail, monkeypatch)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == f"Error: {error.what}\n  {error.fix}\n"


def test_what_the_system_says_of_a_file_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/the/agent/agl.yaml")

    result = invoke_with(fail, monkeypatch)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("Error: /the/agent/agl.yaml: Read-only file system.\n  Look at its folder")


def test_an_error_of_no_file_is_unforeseen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        invoke_with(fail, monkeypatch)


def test_debugging_adds_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConfigError("It is wrong.", "Correct it.")

    monkeypatch.setenv(main.DEBUG_VARIABLE, "1")
    assert "Traceback" in invoke_with(fail, monkeypatch).stderr


def test_windows_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.sys, "platform", "win32")
    result = invoke_with(lambda: None, monkeypatch)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "Error: agl does not run on Windows itself.\n  Use it in WSL, or on Linux or macOS.\n"


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    result = invoke_with(interrupt, monkeypatch)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Interrupted.\n")


def test_an_unforeseen_error_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == diagnostics.FAILED
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("Error: agl itself failed: ZeroDivisionError: division by zero.")


def invoke_with(command: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Result:
    """Run `agl down` with another body."""
    monkeypatch.setattr(down, "down", command)
    return CliRunner().invoke(main.app, ["down"], catch_exceptions=False)
