"""What a check raises where a run is possible but the user should know something first."""

from __future__ import annotations


class Doubt(Exception):
    """`what` was found, and `fix` is what to do where it matters."""

    def __init__(self, what: str, fix: str) -> None:
        self.what, self.fix = what, fix
        super().__init__(f"{what} {fix}")
