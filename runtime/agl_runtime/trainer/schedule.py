"""When to sample, update, save, validate and end: one pure state machine, without clock or I/O.

`begin` and `advance` map a state (and an event) to the next state and the actions that the shell must start; what an
action brings about comes back as an event. At most one of update, save and validation is under way at a time.

Synchronous training is the special case `active == batch`: a batch is enqueued, all its groups finish, an update
follows. With `active > batch` more groups are under way than an update takes, the rest carries over, and a group whose
birth lies more than `max_staleness` updates back is dropped, checked whenever a batch is cut. A batch takes the oldest
groups that are finished. While a validation runs nothing is enqueued and no batch is cut; groups under way go on.

Invariants: a group is updated on whole and once; groups are numbered by their place in the data's order and every
number is enqueued unless the run ends; nothing is enqueued while weights that a checkpoint is due for are unsaved; a
state rebuilt by `resumed` from what `Save` kept goes on as if the run had never been interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, NamedTuple, TypeVar

from agl_runtime.schemas import PolicyVersion

T = TypeVar("T")
BASE_VERSION = PolicyVersion(0, 0)
Ended = Literal["complete", "stopped", "no_signal"]


class Phase(StrEnum):
    SAMPLING = "sampling"
    UPDATING = "updating"
    SAVING = "saving"
    VALIDATING = "validating"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Plan:
    """What the run is to do. Counts of groups: `batch` makes one update, up to `active` are under way at once.

    `max_staleness` is in updates; None never drops a group. `no_signal_steps`: a run without a single update after so
    many steps ends. `validate_every` 0 validates only before the first step and after the last.
    """

    steps: int
    batch: int
    active: int
    max_staleness: int | None = None
    save_every: int = 1
    validates: bool = False
    validate_every: int = 0
    no_signal_steps: int = 2


class Group(NamedTuple):
    """The rollouts of one task: its number in the data's order, and the weights that served when it was enqueued."""

    number: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class State:
    """Where the run stands. `step` counts batches done, `version` names the weights by the run that made them.

    `open` are groups enqueued and not yet updated on, by number; `ready` the numbers of those that are finished.
    `saved` is the version of the newest checkpoint, `saved_step` the step that it stands for, `validated` the step of
    the last validation (-1 before any).
    """

    step: int = 0
    version: PolicyVersion = BASE_VERSION
    next_group: int = 0
    open: tuple[Group, ...] = ()
    ready: frozenset[int] = frozenset()
    saved: PolicyVersion = BASE_VERSION
    saved_step: int = 0
    validated: int = -1
    stopping: bool = False
    phase: Phase = Phase.SAMPLING

    def is_open(self, number: int) -> bool:
        return any(group.number == number for group in self.open)

    def staleness(self, group: Group) -> int:
        """Updates since the group was enqueued, which is before its oldest token was sampled."""
        return self.version.updates - group.version.updates


class GroupFinished(NamedTuple):
    """Every rollout of the group has ended."""

    number: int


class Updated(NamedTuple):
    """The batch is done. `version` is the old one when nothing could be learnt from it."""

    version: PolicyVersion


class Saved(NamedTuple):
    pass


class Validated(NamedTuple):
    pass


class StopAsked(NamedTuple):
    pass


class Enqueue(NamedTuple):
    group: Group


class Drop(NamedTuple):
    """The group is too stale to train on."""

    group: Group


class Update(NamedTuple):
    """Hold new calls, drain, update on these groups, resume."""

    groups: tuple[Group, ...]


class Save(NamedTuple):
    """Make a checkpoint; when its weights are saved already, steps that taught nothing followed: note them there."""


class Validate(NamedTuple):
    pass


class Finish(NamedTuple):
    ended: Ended


Event = GroupFinished | Updated | Saved | Validated | StopAsked
Action = Enqueue | Drop | Update | Save | Validate | Finish
Move = tuple[State, tuple[Action, ...]]


def resumed(step: int, version: PolicyVersion, next_group: int, open_groups: Iterable[Group], validated: int) -> State:
    """The state of a checkpoint. Its open groups are enqueued once more, which finds their rollouts again."""
    return State(step, version, next_group, tuple(open_groups), saved=version, saved_step=step, validated=validated)


def begin(plan: Plan, state: State) -> Move:
    """First move of a process."""
    state, actions = _next(plan, state)
    if state.phase is Phase.DONE:
        return state, actions
    carried = tuple(Enqueue(group) for group in state.open if Enqueue(group) not in actions)
    return state, carried + actions


def advance(plan: Plan, state: State, event: Event) -> Move:
    """The move that answers `event`. An event that comes too late to matter changes nothing."""
    match event:
        case GroupFinished(number) if state.is_open(number):
            state = replace(state, ready=state.ready | {number})
        case Updated(version) if state.phase is Phase.UPDATING:
            state = replace(state, step=state.step + 1, version=version, phase=Phase.SAMPLING)
        case Saved() if state.phase is Phase.SAVING:
            state = replace(state, saved=state.version, saved_step=state.step, phase=Phase.SAMPLING)
        case Validated() if state.phase is Phase.VALIDATING:
            state = replace(state, validated=state.step, phase=Phase.SAMPLING)
        case StopAsked():
            abandoned = state.phase is Phase.VALIDATING
            state = replace(state, stopping=True, phase=Phase.SAMPLING if abandoned else state.phase)
        case _:
            return state, ()
    return _next(plan, state)


def cut(
    groups: Iterable[T],
    batch: int,
    max_staleness: int | None,
    staleness: Callable[[T], int],
    is_ready: Callable[[T], bool],
) -> tuple[tuple[T, ...], tuple[T, ...]]:
    """Of `groups`, oldest first: those that are too stale, finished or not; and of the others the first `batch` that
    are ready, or none while these are fewer."""
    groups = tuple(groups)
    stale = tuple(group for group in groups if max_staleness is not None and staleness(group) > max_staleness)
    ready = tuple(group for group in groups if group not in stale and is_ready(group))
    return stale, ready[:batch] if len(ready) >= batch else ()


def _next(plan: Plan, state: State) -> Move:
    if state.phase is not Phase.SAMPLING:
        return state, ()
    ended = _ended(plan, state)
    unsaved = state.version.updates - state.saved.updates
    is_behind = state.version.updates > 0 and state.step > state.saved_step
    if unsaved >= plan.save_every or (is_behind and (not unsaved or ended or state.step >= plan.steps)):
        return replace(state, phase=Phase.SAVING), (Save(),)
    if ended:
        return replace(state, phase=Phase.DONE), (Finish(ended),)
    if _validation_due(plan, state):
        return replace(state, phase=Phase.VALIDATING), (Validate(),)
    return _sample(plan, state)


def _ended(plan: Plan, state: State) -> Ended | None:
    if state.version.updates == 0 and state.step >= min(plan.no_signal_steps, plan.steps):
        return "no_signal"
    if state.step >= plan.steps and not _validation_due(plan, state):
        return "complete"
    return "stopped" if state.stopping else None


def _validation_due(plan: Plan, state: State) -> bool:
    return plan.validates and validation_due(state.step, state.validated, plan.steps, plan.validate_every)


def validation_due(step: int, validated: int, steps: int, every: int) -> bool:
    """Whether the weights of `step`, of `steps`, are to be measured; `validated` is the step of the last validation."""
    return step != validated and (step == 0 or step >= steps or (every > 0 and step % every == 0))


def _sample(plan: Plan, state: State) -> Move:
    """Drop what is too stale, cut a batch if one is complete, and keep as many groups under way as wanted."""
    stale, batch = cut(
        state.open, plan.batch, plan.max_staleness, state.staleness, lambda group: group.number in state.ready
    )
    state = _without(state, stale)
    drops = tuple(Drop(group) for group in stale)
    if batch:
        return replace(_without(state, batch), phase=Phase.UPDATING), (*drops, Update(batch))
    still_needed = (plan.steps - state.step) * plan.batch - len(state.open)
    count = max(0, min(plan.active - len(state.open), still_needed))
    fresh = tuple(Group(state.next_group + i, state.version) for i in range(count))
    state = replace(state, next_group=state.next_group + count, open=state.open + fresh)
    return state, drops + tuple(Enqueue(group) for group in fresh)


def _without(state: State, groups: Iterable[Group]) -> State:
    gone = {group.number for group in groups}
    kept = tuple(group for group in state.open if group.number not in gone)
    return replace(state, open=kept, ready=state.ready - gone)
