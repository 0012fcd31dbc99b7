"""1.0 where every test passes that should, after the agent's patch, in a container that the agent never saw."""

import json
import shlex
import subprocess
from pathlib import Path

SCRIPT = """
cd /testbed && git apply --whitespace=nowarn - || exit 0
git checkout -q HEAD -- {files}
source /opt/miniconda3/bin/activate testbed
timeout 300 python -m pytest -rA --tb=no -p no:cacheprovider {files}
"""


def reward(task: dict, workspace: str) -> float:
    trajectory = Path(workspace) / "trajectory.json"
    if not trajectory.is_file():
        return 0.0
    patch = json.loads(trajectory.read_text(encoding="utf-8"))["info"].get("submission") or ""
    if not patch.strip():
        return 0.0
    script = SCRIPT.format(files=" ".join(map(shlex.quote, task["files"])))
    limits = ["--network", "none", "--memory", "8g", "--pids-limit", "512"]
    command = ["docker", "run", "--rm", "-i", *limits, task["tests_image"], "bash", "-c", script]
    done = subprocess.run(command, input=patch + "\n", text=True, capture_output=True)
    if done.returncode == 125:  # docker itself failed: the attempt is made again
        raise RuntimeError(done.stderr[-500:])
    passed = {line.removeprefix("PASSED ") for line in done.stdout.splitlines() if line.startswith("PASSED ")}
    return float(set(task["must_pass"]) <= passed)
