from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agl_cli.continuity import REMEDIES, Continuity, Origin, as_json, main_names, measure, origin_of
from agl_cli.history import REWRITTEN
from agl_cli.project import open_project
from agl_runtime.calls import CallInfo
from agl_runtime.samples import diagnose
from agl_runtime.samples.build import PROMPT_OVER_LIMIT, UNDIAGNOSED
from agl_runtime.samples.types import RolloutSamples
from fakes.projects import make_project
from fakes.trained import make_samples

ORIGIN = Origin("claude", "models/m")


def rollout(samples: int, **splits: int) -> RolloutSamples:
    made = make_samples("r", samples=samples)
    made.report.splits.update(splits)
    return made


def info(dialect: str) -> CallInfo:
    return CallInfo("c", "r", "0", 0, dialect, committed=True, model="policy")


def test_every_cause_has_a_remedy() -> None:
    causes = {
        line.split()[0] for line in str(diagnose.__doc__).splitlines() if line.startswith("    ") and line[4] != " "
    }
    assert causes | {REWRITTEN, UNDIAGNOSED, PROMPT_OVER_LIMIT} == set(REMEDIES)


def test_rollouts_are_counted_by_their_samples_and_splits_by_cause() -> None:
    found = measure(
        [rollout(1), rollout(1), rollout(3, template=1, other=1), rollout(2, template=1), rollout(0, other=1)]
    )
    assert found.sentence(ORIGIN) == (
        "of the newest 4 rollouts of claude, 2 became 1 sample, 1 became 2 samples, 1 became 3 samples; "
        "splits: 2 template, 1 other (template of models/m)"
    )
    assert list(found.remedies) == ["template", "other"]
    assert found.fix == REMEDIES["template"]


def test_what_did_not_split_needs_no_remedy() -> None:
    found = measure([rollout(1)])
    assert found.sentence(ORIGIN) == "of the newest 1 rollout of claude, 1 became 1 sample"
    assert (found.remedies, found.fix) == ({}, "")
    assert measure([rollout(2, other=1)]).fix == ""
    assert measure([]) == Continuity()


def test_where_several_names_were_asked_for_the_remedy_of_other_is_to_say_what_they_mean() -> None:
    found = measure([rollout(2, other=1)], ["gpt-5-mini", "gpt-5", "gpt-5"])
    assert found.fix.startswith("Main work was asked of gpt-5 and gpt-5-mini: name in gateway.models those that are")
    assert found.remedies == {"other": f"{found.fix} {REMEDIES['other']}"}
    assert measure([rollout(2, other=1)], ["gpt-5", "gpt-5"]).remedies == {"other": REMEDIES["other"]}
    assert "gateway.models" not in measure([rollout(2, trimmed=1)], ["gpt-5", "gpt-5-mini"]).fix


def test_names_with_a_meaning_are_no_longer_asked_about() -> None:
    calls = [replace(info("chat"), model=name) for name in ("gpt-5", "gpt-5-mini", "haiku")]
    calls.append(replace(info("chat"), model="title", kind="auxiliary"))
    assert main_names(calls, Origin()) == {"gpt-5", "gpt-5-mini", "haiku"}
    assert main_names(calls, Origin(named=("gpt-*",))) == {"haiku"}
    told = as_json(rollout(2, other=1), Origin(), calls)["remedies"]["other"]
    assert told.startswith("Main work was asked of gpt-5 and gpt-5-mini and haiku:")


def test_rollouts_that_were_dropped_whole_are_told_with_the_setting_that_drops_them() -> None:
    lost = rollout(0)
    lost.report.dropped["prompt_over_limit"] = 1
    found = measure([lost, rollout(0)])
    assert found.sentence(ORIGIN) == (
        "of the newest 1 rollout of claude, 1 became no samples; dropped: 1 prompt_over_limit"
    )
    assert found.fix.startswith("Raise train.max_prompt_tokens")


@pytest.mark.parametrize(
    ("command", "harness"),
    [
        ("claude -p {question}", "claude"),
        ("/opt/bin/codex exec {question}", "codex"),
        ("python -u agent.py {question}", "agent.py"),
        ("python3.12 -m my.agent {question}", "my.agent"),
        ("python", "python"),
        ("""sh -c 'exec codex exec "$0"' {question}""", "codex"),
        ("""sh -c 'exec "$@" -c x' sh /opt/codex exec {question}""", "codex"),
        ("bash -c 'python -m agent' {question}", "agent"),
        ("bash agent.sh {question}", "bash"),
    ],
)
def test_the_harness_is_the_program_that_runs(tmp_path: Path, command: str, harness: str) -> None:
    project = open_project(
        make_project(tmp_path / "p"), [f"agent.command={json.dumps(command)}", "model.path=models/m"]
    )
    assert origin_of(project) == Origin(harness, "models/m")


def test_one_rollout_names_its_dialects_and_remedies() -> None:
    found = as_json(rollout(2, trimmed=1), ORIGIN, [info("messages"), info("chat"), info("messages")])
    remedies = {"trimmed": REMEDIES["trimmed"]}
    assert found == {
        "harness": "claude",
        "template": "models/m",
        "dialects": ["chat", "messages"],
        "remedies": remedies,
    }
    assert as_json(rollout(0, trimmed=1), ORIGIN, [])["remedies"] == remedies
