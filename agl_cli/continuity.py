"""How well harness and chat template keep a conversation together: how many samples a rollout became, why it split,
and what to do about it. Pure.

A turn whose prompt begins with all ids of the turn before goes on with its sample; any other begins a new one, which is
trained on as well but costs its whole history again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from agl_cli import output, window
from agl_cli.history import REWRITTEN
from agl_runtime.calls import CallInfo
from agl_runtime.config import Project
from agl_runtime.controller.runners.command import split_command
from agl_runtime.samples.build import PROMPT_OVER_LIMIT
from agl_runtime.samples.types import RolloutSamples

# By the cause of a split (see `agl_runtime.samples.diagnose` and `history`), or of a dropped sample.
REMEDIES: Mapping[str, str] = {
    "template": "Use a chat template that leaves earlier turns as they were: many drop their reasoning, which some "
    "harnesses do not send back either (docs/agents.md).",
    REWRITTEN: "The agent changed what it had sent, or the model's answer: have it send answers back as they were and "
    "keep its instructions (a clock in them, say) and tools the same in mid-run (docs/agents.md).",
    "trimmed": "Use a chat template that does not trim what the assistant said, or a harness that sends it back whole.",
    "retokenized": "Nothing is lost but compute: the policy spelled a text in unusual tokens. A lower "
    "train.temperature makes that rarer.",
    "truncated": "Tell the harness what context is served (docs/agents.md), so that it keeps its history longer.",
    "omitted": "Tell the model in the harness's prompt what form answers must have: those that it cannot use it leaves "
    "out of its history.",
    "undiagnosed": "Set model.path to a folder that holds the policy's tokenizer.json, so that the cause can be told.",
    "other": "Nothing to mend: sub-agents, branches and compactions begin samples of their own.",
    PROMPT_OVER_LIMIT: "Raise train.max_prompt_tokens above what the harness says before the agent's first answer.",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose conversations these are, as agl.yaml has it now: the agent's program, whose chat template, and the names
    and patterns in gateway.models."""

    harness: str = ""
    template: str = ""
    named: tuple[str, ...] = ()


NOBODY = Origin()


@dataclass(frozen=True, slots=True)
class Continuity:
    """`samples` counts rollouts by the number of samples that they became, `splits` by cause the samples that broke off
    an earlier one, `dropped` those that were left out whole. `names` are those under which main work was asked for."""

    samples: Counter[int] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    names: tuple[str, ...] = ()

    @property
    def remedies(self) -> dict[str, str]:
        """By cause, the most frequent first."""
        remedies = {cause: REMEDIES[cause] for cause, _ in (self.splits + self.dropped).most_common()}
        if "other" in remedies and self._side_jobs:
            remedies["other"] = f"{self._side_jobs} {remedies['other']}"
        return remedies

    @property
    def fix(self) -> str:
        """What to do, in words; empty where nothing is to be mended."""
        remedies = [REMEDIES[cause] if cause != "other" else self._side_jobs for cause in self.remedies]
        return " ".join(remedy for remedy in remedies if remedy)

    @property
    def _side_jobs(self) -> str:
        """What to do where some of these conversations may be no main work; empty where one name was asked for."""
        if len(self.names) < 2:
            return ""
        return (
            f"Main work was asked of {' and '.join(self.names)}: name in gateway.models those that are side jobs, such "
            "as titles, and those that mean the policy (docs/gateway.md)."
        )

    def sentence(self, origin: Origin) -> str:
        became = ", ".join(
            f"{count} became {size or 'no'} sample{'' if size == 1 else 's'}"
            for size, count in sorted(self.samples.items())
        )
        told = f"of the newest {output.counted(self.samples.total(), 'rollout')} of {origin.harness}, {became}"
        for name, causes in (("splits", self.splits), ("dropped", self.dropped)):
            if causes:
                told += f"; {name}: {', '.join(f'{count} {cause}' for cause, count in causes.most_common())}"
        return f"{told} (template of {origin.template})" if self.splits else told


def measure(rollouts: Iterable[RolloutSamples], names: Iterable[str] = ()) -> Continuity:
    """Of rollouts that can be trained on at all, with the model names that their main calls asked for."""
    found = Continuity(names=tuple(sorted(set(names))))
    for rollout in rollouts:
        if rollout.samples or rollout.report.dropped:
            found.samples[len(rollout.samples)] += 1
            found.splits.update(rollout.report.splits)
            found.dropped.update(rollout.report.dropped)
    return found


def origin_of(project: Project) -> Origin:
    model, words = project.config.model, split_command(project.config.agent.command)
    words = window.program(words)
    program = Path(words[0]).name
    if program.startswith("python"):
        program = next((word for word in words[1:] if not word.startswith("-")), program)
    return Origin(program, model.endpoint or model.path or "no model yet", tuple(project.config.gateway.models))


def as_json(samples: RolloutSamples, origin: Origin, calls: Sequence[CallInfo]) -> dict[str, Any]:
    """Of one rollout and its calls; the counts stand in its report."""
    names = tuple(sorted(main_names(calls, origin)))
    found = Continuity(splits=Counter(samples.report.splits), dropped=Counter(samples.report.dropped), names=names)
    return {
        "harness": origin.harness,
        "template": origin.template,
        "dialects": sorted({call.dialect for call in calls}),
        "remedies": found.remedies,
    }


def main_names(calls: Iterable[CallInfo], origin: Origin) -> set[str]:
    """The model names under which main work was asked for, but for those that gateway.models gives a meaning."""
    names = {call.model for call in calls if call.kind == "main"}
    return {name for name in names if not any(fnmatchcase(name, pattern) for pattern in origin.named)}
