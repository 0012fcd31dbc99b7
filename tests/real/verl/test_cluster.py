"""verl's trainer runs where agl does, whichever node of Ray has room, with what agl tells it (`cluster.py`)."""

from __future__ import annotations

import json
from pathlib import Path

from fakes.verl import run_in_verl


def test_verls_trainer_runs_on_the_node_that_starts_it_though_another_has_all_the_cores(tmp_path: Path) -> None:
    said = run_in_verl(Path(__file__).with_name("cluster.py"), tmp_path / "node", timeout_s=120)
    found = json.loads(said.splitlines()[-1])
    assert (tmp_path / "node").read_text() == found["here"] != found["elsewhere"]
