"""Everything that goes to stderr: errors with their exit codes, notes, progress.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 a precondition is missing, 130 interrupted. An error is
shown as one sentence of what is wrong and one of what to do, without a traceback unless AGL_CLI_DEBUG is set.
"""

from __future__ import annotations

import os
import sys
import traceback

from agl_runtime.errors import AglError, ConfigError, PreconditionError

DONE, FAILED, USAGE, MISSING, INTERRUPTED = 0, 1, 2, 3, 130


def exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, ConfigError):
        return USAGE
    return MISSING if isinstance(error, PreconditionError | OSError) else FAILED


def report(error: AglError | OSError | KeyboardInterrupt) -> int:
    """Show the error; returns the exit code that belongs to it. An OSError is one of a file."""
    if os.environ.get("AGL_CLI_DEBUG"):
        note("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, AglError):
        problem(error.what, error.fix)
    elif isinstance(error, OSError):
        problem(f"{error.filename}: {error.strerror}.", "Look at its folder: is it there, writable, and not full?")
    else:
        note("Interrupted.")
    return exit_code(error)


def fault(error: Exception) -> int:
    """An exception that nobody foresaw."""
    problem(
        f"agl itself failed: {type(error).__name__}: {error}.",
        "Run it again with AGL_CLI_DEBUG=1 and report what it prints.",
    )
    return FAILED


def problem(what: str, fix: str = "", *, level: str = "Error") -> None:
    note(f"{level}: {what}")
    if fix:
        note(f"  {fix}")


def note(text: str = "") -> None:
    print(text, file=sys.stderr, flush=True)
