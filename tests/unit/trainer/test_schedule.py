"""The schedule is run against a simulated world that finishes things in any order, stops and crashes at any moment."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_runtime.schemas import PolicyVersion
from agl_runtime.trainer import schedule
from agl_runtime.trainer.schedule import (
    Drop,
    Enqueue,
    Event,
    Finish,
    Group,
    GroupFinished,
    Phase,
    Plan,
    Save,
    Saved,
    State,
    StopAsked,
    Update,
    Updated,
    Validate,
    Validated,
)


@dataclass
class World:
    """What the shell would do, with nothing but bookkeeping. `skips` are steps that teach nothing."""

    plan: Plan
    rng: random.Random
    skips: frozenset[int] = frozenset()
    state: State = field(default_factory=State)
    epoch: int = 1
    trained: list[tuple[Group, ...]] = field(default_factory=list)
    actions: list[schedule.Action] = field(default_factory=list)
    enqueued: list[int] = field(default_factory=list)
    going: list[Event] = field(default_factory=list)
    validated_at: list[int] = field(default_factory=list)
    kept: tuple[State, int] = (State(), 0)
    ended: str | None = None

    def begin(self) -> None:
        self._take(schedule.begin(self.plan, self.state))

    def happen(self, event: Event) -> None:
        self._take(schedule.advance(self.plan, self.state, event))

    def tick(self) -> None:
        """One of the things under way comes to its end."""
        self.happen(self.going.pop(self.rng.randrange(len(self.going))))

    def run(self, ticks: int = 10_000) -> None:
        for _ in range(ticks):
            if self.ended:
                return
            self.tick()

    def crash(self) -> World:
        """Everything but the newest checkpoint is gone; another process begins there."""
        saved, updates = self.kept
        begun = schedule.resumed(
            saved.step, saved.version, saved.next_group, saved.open, max(self._validated(saved.step))
        )
        state = begun if saved.version.updates else State(validated=max(self._validated(0)))
        validated = [step for step in self.validated_at if step <= state.step]
        again = replace(
            self,
            state=state,
            epoch=self.epoch + 1,
            trained=self.trained[:updates],
            actions=[],
            enqueued=[],
            going=[],
            validated_at=validated,
        )
        again.begin()
        return again

    def _validated(self, step: int) -> list[int]:
        return [-1, *(at for at in self.validated_at if at <= step)]

    def _take(self, move: schedule.Move) -> None:
        self.state, actions = move
        self.actions += actions
        for action in actions:
            self._start(action)

    def _start(self, action: schedule.Action) -> None:
        match action:
            case Enqueue(group):
                assert group.number not in self.enqueued, "a group was enqueued twice"
                assert self.state.phase is not Phase.UPDATING
                self.enqueued.append(group.number)
                self.going.append(GroupFinished(group.number))
            case Update(groups):
                assert len(groups) == self.plan.batch
                skipped = self.state.step + 1 in self.skips
                updates = self.state.version.updates
                version = self.state.version if skipped else PolicyVersion(self.epoch, updates + 1)
                if not skipped:
                    self.trained.append(groups)
                self.going.append(Updated(version))
            case Save():
                self.kept = (self.state, len(self.trained))
                self.going.append(Saved())
            case Validate():
                self.validated_at.append(self.state.step)
                self.going.append(Validated())
            case Finish(ended):
                self.ended = ended


def plans(**fixed: object) -> st.SearchStrategy[Plan]:
    batch = st.integers(1, 4)
    return batch.flatmap(
        lambda size: st.builds(
            Plan,
            **{
                "steps": st.integers(1, 7),
                "batch": st.just(size),
                "active": st.integers(size, size + 5),
                "max_staleness": st.none() | st.integers(0, 3),
                "save_every": st.integers(1, 4),
                "validates": st.booleans(),
                "validate_every": st.integers(0, 3),
                **{name: st.just(value) for name, value in fixed.items()},
            },
        )
    )


def sync(plan: Plan) -> Plan:
    return replace(plan, active=plan.batch)


def world(plan: Plan, seed: int = 0, **more: object) -> World:
    made = World(plan, random.Random(seed), **more)
    made.begin()
    return made


def test_a_synchronous_step_enqueues_a_batch_waits_for_all_of_it_updates_saves_and_goes_on() -> None:
    at = world(Plan(steps=2, batch=2, active=2))
    base = schedule.BASE_VERSION
    assert at.actions == [Enqueue(Group(0, base)), Enqueue(Group(1, base))]
    at.happen(GroupFinished(1))
    assert at.state.phase is Phase.SAMPLING
    at.happen(GroupFinished(0))
    assert at.actions[2:] == [Update((Group(0, base), Group(1, base)))]
    at.happen(Updated(PolicyVersion(1, 1)))
    assert at.actions[3:] == [Save()]
    at.happen(Saved())
    assert at.actions[4:] == [Enqueue(Group(2, PolicyVersion(1, 1))), Enqueue(Group(3, PolicyVersion(1, 1)))]


@given(plans(), st.integers())
@settings(max_examples=200, deadline=None)
def test_an_undisturbed_run_completes_trains_no_group_twice_and_drops_only_what_is_too_stale(
    plan: Plan, seed: int
) -> None:
    at = world(plan, seed)
    at.run()
    numbers = [group.number for groups in at.trained for group in groups]
    dropped = [action.group.number for action in at.actions if isinstance(action, Drop)]
    assert at.ended == "complete"
    assert len(at.trained) == plan.steps
    assert len(set(numbers)) == len(numbers)
    assert sorted([*numbers, *dropped]) == list(range(at.state.next_group))
    assert plan.max_staleness is not None or not dropped
    assert at.kept[0].version == at.state.version


@given(plans(), st.integers())
@settings(max_examples=200, deadline=None)
def test_at_most_the_wanted_number_of_groups_is_under_way_and_none_is_trained_that_is_too_stale(
    plan: Plan, seed: int
) -> None:
    at = world(plan, seed)
    while not at.ended:
        assert len(at.state.open) <= plan.active
        at.tick()
    for updates, groups in enumerate(at.trained):
        for group in groups:
            assert plan.max_staleness is None or updates - group.version.updates <= plan.max_staleness


@given(plans(), st.integers())
@settings(max_examples=100, deadline=None)
def test_a_synchronous_run_takes_the_groups_in_the_order_of_the_data(plan: Plan, seed: int) -> None:
    at = world(sync(plan), seed)
    at.run()
    numbers = [[group.number for group in groups] for groups in at.trained]
    assert numbers == [list(range(n * plan.batch, (n + 1) * plan.batch)) for n in range(plan.steps)]


@given(plans(), st.integers())
@settings(max_examples=100, deadline=None)
def test_validation_comes_before_the_first_step_after_the_last_and_where_asked(plan: Plan, seed: int) -> None:
    at = world(plan, seed)
    at.run()
    asked = {n for n in range(1, plan.steps) if plan.validate_every and n % plan.validate_every == 0}
    assert at.validated_at == (sorted({0, plan.steps} | asked) if plan.validates else [])


@given(plans(), st.integers(), st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_a_stop_at_any_moment_saves_what_was_trained_and_begins_nothing_new(plan: Plan, seed: int, moment: int) -> None:
    at = world(plan, seed)
    at.run(moment)
    if at.ended:
        return
    before = len(at.actions)
    at.happen(StopAsked())
    at.run()
    assert at.ended in ("stopped", "complete")
    assert not [action for action in at.actions[before:] if isinstance(action, Enqueue | Validate | Update)]
    assert at.state.saved == at.state.version


@given(plans(), st.integers(), st.lists(st.integers(0, 25), max_size=4), st.frozensets(st.integers(1, 7), max_size=3))
@settings(max_examples=300, deadline=None)
def test_a_synchronous_run_killed_at_any_moments_ends_as_one_that_was_not(
    plan: Plan, seed: int, moments: list[int], skips: frozenset[int]
) -> None:
    plan = replace(sync(plan), no_signal_steps=99)
    whole = world(plan, seed, skips=skips)
    whole.run()
    killed = world(plan, seed, skips=skips)
    for moment in moments:
        killed.run(moment)
        if not killed.ended:
            killed = killed.crash()
    killed.run()
    assert killed.ended == whole.ended
    assert _numbers(killed) == _numbers(whole)
    assert killed.state.step == whole.state.step
    assert sorted(set(killed.validated_at)) == whole.validated_at


@given(plans(), st.integers(), st.lists(st.integers(0, 40), max_size=4))
@settings(max_examples=300, deadline=None)
def test_killed_at_any_moments_an_asynchronous_run_trains_no_group_twice_nor_too_stale(
    plan: Plan, seed: int, moments: list[int]
) -> None:
    at = world(plan, seed)
    for moment in moments:
        at.run(moment)
        if not at.ended:
            at = at.crash()
    at.run()
    numbers = [number for numbers in _numbers(at) for number in numbers]
    assert (at.ended, len(at.trained), len(set(numbers))) == ("complete", plan.steps, plan.steps * plan.batch)
    for updates, groups in enumerate(at.trained):
        assert (
            plan.max_staleness is None or updates - min(group.version.updates for group in groups) <= plan.max_staleness
        )


@given(plans(validates=True, validate_every=1), st.integers())
@settings(max_examples=100, deadline=None)
def test_a_validation_has_the_weights_for_itself_while_groups_under_way_go_on(plan: Plan, seed: int) -> None:
    at = world(plan, seed)
    while not at.ended:
        before, was = len(at.actions), at.state
        at.tick()
        if was.phase is at.state.phase is Phase.VALIDATING:
            assert at.actions[before:] == []
            assert at.state.open == was.open
            assert at.state.ready >= was.ready


@given(plans(max_staleness=None), st.integers(), st.lists(st.integers(0, 40), max_size=4))
@settings(max_examples=200, deadline=None)
def test_an_asynchronous_run_killed_at_any_moments_trains_each_group_once_and_loses_none(
    plan: Plan, seed: int, moments: list[int]
) -> None:
    at = world(plan, seed)
    for moment in moments:
        at.run(moment)
        if not at.ended:
            at = at.crash()
    at.run()
    numbers = sorted(number for numbers in _numbers(at) for number in numbers)
    assert numbers == list(range(plan.steps * plan.batch))


def _numbers(at: World) -> list[list[int]]:
    return [[group.number for group in groups] for groups in at.trained]


def test_groups_that_carry_over_keep_the_weights_that_they_were_enqueued_under() -> None:
    at = world(Plan(steps=3, batch=1, active=2))
    for event in (GroupFinished(1), Updated(PolicyVersion(1, 1)), Saved()):
        at.happen(event)
    assert at.state.open == (Group(0, schedule.BASE_VERSION), Group(2, PolicyVersion(1, 1)))
    again = schedule.resumed(1, PolicyVersion(1, 1), at.kept[0].next_group, at.kept[0].open, -1)
    _, actions = schedule.begin(at.plan, again)
    assert actions == (Enqueue(Group(0, schedule.BASE_VERSION)), Enqueue(Group(2, PolicyVersion(1, 1))))


def test_a_group_too_stale_is_dropped_before_a_batch_is_cut_and_another_takes_its_place() -> None:
    at = world(Plan(steps=4, batch=1, active=2, max_staleness=0))
    for event in (GroupFinished(1), Updated(PolicyVersion(1, 1)), Saved()):
        at.happen(event)
    assert at.actions[-3:] == [
        Drop(Group(0, schedule.BASE_VERSION)),
        Enqueue(Group(2, PolicyVersion(1, 1))),
        Enqueue(Group(3, PolicyVersion(1, 1))),
    ]
    at.happen(GroupFinished(0))
    assert at.state.ready == frozenset()


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_whose_first_steps_all_teach_nothing_ends_without_signal(steps: int) -> None:
    at = world(Plan(steps=steps, batch=1, active=1, validates=True, no_signal_steps=2), skips=frozenset(range(1, 9)))
    at.run()
    assert at.ended == "no_signal"
    assert at.state.step == min(2, steps)
    assert at.validated_at == [0]


def test_a_step_that_teaches_nothing_later_on_is_passed_over() -> None:
    at = world(Plan(steps=4, batch=1, active=1, no_signal_steps=1), skips=frozenset({2, 3}))
    at.run()
    assert at.ended == "complete"
    assert [groups[0].number for groups in at.trained] == [0, 3]


def test_steps_passed_over_after_a_checkpoint_are_saved_and_not_done_again() -> None:
    at = world(Plan(steps=3, batch=1, active=1), skips=frozenset({2, 3}))
    at.run()
    assert [action for action in at.actions if isinstance(action, Save)] == [Save()] * 3
    at.plan = replace(at.plan, steps=4)
    assert at.crash().actions == [Enqueue(Group(3, PolicyVersion(1, 1)))]


def test_a_run_with_more_steps_than_before_goes_on_where_it_ended() -> None:
    at = world(Plan(steps=2, batch=1, active=1, validates=True))
    at.run()
    at.plan = replace(at.plan, steps=3)
    again = at.crash()
    assert again.actions == [Enqueue(Group(2, PolicyVersion(1, 2)))]


def test_a_complete_run_begun_again_ends_at_once() -> None:
    at = world(Plan(steps=2, batch=1, active=1, validates=True))
    at.run()
    assert at.crash().actions == [Finish("complete")]


def test_events_that_come_too_late_change_nothing() -> None:
    plan = Plan(steps=1, batch=1, active=1, validates=True, save_every=5)
    at = world(plan)
    at.happen(StopAsked())
    ended = at.state
    for event in (Validated(), Saved(), Updated(PolicyVersion(1, 1)), GroupFinished(7)):
        assert schedule.advance(plan, ended, event) == (ended, ())


@pytest.mark.parametrize(
    ("limit", "batch", "stale", "chosen"),
    [
        (None, 2, [], [1, 3]),
        (2, 2, [1], [3, 4]),
        (0, 1, [1, 2, 3], [4]),
        (2, 3, [1], []),
    ],
)
def test_a_batch_takes_the_oldest_that_are_ready_and_not_too_stale(
    limit: int | None, batch: int, stale: list[int], chosen: list[int]
) -> None:
    staleness = {1: 3, 2: 2, 3: 1, 4: 0}
    found = schedule.cut(staleness, batch, limit, staleness.__getitem__, {1, 3, 4}.__contains__)
    assert tuple(map(list, found)) == (stale, chosen)
