from __future__ import annotations

from agl_cli import diagnostics
from agl_cli.session import part_error
from agl_cli.supervisor import PartEnd
from agl_runtime.errors import ConfigError


def test_what_a_part_said_is_told_once() -> None:
    error = part_error(PartEnd("trainer", diagnostics.USAGE, "verl failed: no. See `agl logs trainer`."))
    assert isinstance(error, ConfigError)
    assert (error.what, error.fix) == ("The trainer stopped: verl failed: no.", "See `agl logs trainer`.")


def test_a_part_that_said_nothing_is_told_by_its_exit_code() -> None:
    assert part_error(PartEnd("gateway", 9)).what == "The gateway stopped: it ended with exit code 9."
