"""What every implementation of `store.base.Store` does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_runtime.calls import Experts, unpack
from agl_runtime.errors import ConflictError, NotFoundError, StoreError
from agl_runtime.schemas import (
    ALLOWED_TRANSITIONS,
    CheckpointRecord,
    RolloutConfig,
    RolloutCreate,
    RolloutMetadata,
    RolloutState,
    RolloutStatusPatch,
)
from agl_runtime.store.base import Store
from agl_runtime.store.sqlite import SqliteStore
from fakes.recorded import UPSTREAM, Clock, commit, intent, record

QUEUING, RUNNING, SUCCEEDED, FAILED = RolloutState
LARGE = "data:image/png;base64," + "iVBORw0KGgo" * 200


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[SqliteStore])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[Store]:
    opened: Store = request.param(tmp_path / "store.sqlite3", clock=clock, steady=clock)
    await opened.open()
    yield opened
    await opened.close()


async def enqueue(store: Store, *names: str, **fields: Any) -> None:
    await store.add_rollouts([RolloutCreate(**{"rollout_id": name, "input": {}, **fields}) for name in names])


async def finish(store: Store, rollout_id: str, state: RolloutState = SUCCEEDED) -> None:
    await store.patch_rollout(rollout_id, RolloutStatusPatch(state=RUNNING))
    await store.patch_rollout(rollout_id, RolloutStatusPatch(state=state))


# rollouts


async def test_a_rollout_reads_back_as_it_was_enqueued(store: Store, clock: Clock) -> None:
    task = {"question": "2+2", "image": LARGE, "deep": [{"n": 1.5, "big": 2**80}], "empty": None}
    item = RolloutCreate(
        rollout_id="r",
        input=task,
        is_train=False,
        config=RolloutConfig(timeout_seconds=7),
        metadata=RolloutMetadata.model_validate({"group_id": "g", "index": 3}),
    )
    (added,) = await store.add_rollouts([item])
    read = await store.get_rollout("r")
    assert read == added
    assert (read.input, read.is_train, read.config.timeout_seconds) == (task, False, 7)
    assert read.metadata.model_dump(exclude_unset=True) == {"group_id": "g", "index": 3}
    assert (read.status.state, read.status.version, read.status.created_at) == (QUEUING, 1, clock.now_s)


async def test_an_id_that_exists_returns_the_stored_rollout_unchanged(store: Store) -> None:
    await enqueue(store, "r", input={"first": True})
    again, new = await store.add_rollouts(
        [RolloutCreate(rollout_id="r", input={"first": False}), RolloutCreate(input={"named": False})]
    )
    assert again.input == {"first": True}
    assert len(new.rollout_id) == 32
    assert len(await store.list_rollouts([QUEUING], 10)) == 2


async def test_enqueuing_is_all_or_none(store: Store) -> None:
    with pytest.raises(StoreError, match=r"cannot be stored as JSON .* Send plain JSON values"):
        await store.add_rollouts(
            [RolloutCreate(rollout_id="a", input=1), RolloutCreate(rollout_id="b", input=object())]
        )
    with pytest.raises(NotFoundError, match=r"There is no rollout a\. Look at `agl rollouts ls`\."):
        await store.get_rollout("a")


async def test_rollouts_are_listed_by_state_in_order_of_creation(store: Store) -> None:
    await enqueue(store, "c", "a", "b", "d")
    await store.patch_rollout("a", RolloutStatusPatch(state=RUNNING))
    await finish(store, "d")
    assert [r.rollout_id for r in await store.list_rollouts([QUEUING, RUNNING], 10)] == ["c", "a", "b"]
    assert [r.rollout_id for r in await store.list_rollouts([QUEUING, RUNNING], 2)] == ["c", "a"]
    assert await store.list_rollouts([FAILED], 10) == []


@pytest.mark.parametrize("new", list(RolloutState))
@pytest.mark.parametrize("old", list(RolloutState))
async def test_only_allowed_transitions_pass(store: Store, old: RolloutState, new: RolloutState) -> None:
    await enqueue(store, "r")
    for state in {QUEUING: [], RUNNING: [RUNNING], SUCCEEDED: [RUNNING, SUCCEEDED], FAILED: [FAILED]}[old]:
        await store.patch_rollout("r", RolloutStatusPatch(state=state))
    patch = RolloutStatusPatch(state=new, error_message="why")
    if new in ALLOWED_TRANSITIONS[old]:
        assert (await store.patch_rollout("r", patch)).status.state is new
    else:
        with pytest.raises(ConflictError, match=f"Rollout r cannot go from {old} to {new}"):
            await store.patch_rollout("r", patch)
        status = (await store.get_rollout("r")).status
        assert (status.state, status.error_message) == (old, None)


async def test_a_patch_changes_only_what_it_names(store: Store, clock: Clock) -> None:
    await enqueue(store, "r")
    await store.patch_rollout("r", RolloutStatusPatch(error_message="slow", k8s_job_name="job"))
    clock.now_s += 5
    patched = await store.patch_rollout("r", RolloutStatusPatch(error_message=None, last_attempt_id="2"))
    status = patched.status
    assert (status.error_message, status.k8s_job_name, status.last_attempt_id) == (None, "job", "2")
    assert (status.state, status.version, status.updated_at - status.created_at) == (QUEUING, 3, 5)
    assert await store.patch_rollout("r", RolloutStatusPatch()) == patched
    with pytest.raises(NotFoundError, match="There is no rollout other"):
        await store.patch_rollout("other", RolloutStatusPatch(state=RUNNING))


async def test_deleting_takes_everything_along_and_twice_is_no_error(store: Store) -> None:
    await enqueue(store, "r", "s")
    await record(store, "c", messages=[LARGE])
    await store.add_event("r", "0", "reward", {"value": 1})
    await store.delete_rollout("r")
    await store.delete_rollout("r")
    with pytest.raises(NotFoundError):
        await store.events("r")
    await enqueue(store, "r")
    assert (await store.calls("r"), await store.events("r"), await store.attempts("r")) == ([], [], [])
    assert [r.rollout_id for r in await store.list_rollouts([QUEUING], 9)] == ["s", "r"]


async def test_content_shared_with_a_deleted_rollout_stays(store: Store) -> None:
    await enqueue(store, "r", "s", input={"image": LARGE})
    await record(store, "c", messages=[LARGE])
    await record(store, "d", messages=[LARGE], rollout_id="s")
    await store.delete_rollout("r")
    assert (await store.get_rollout("s")).input == {"image": LARGE}
    assert (await store.calls("s"))[0].request["messages"] == [LARGE]


# the log of finished rollouts


async def test_the_terminal_page_is_in_order_of_completion(store: Store) -> None:
    await enqueue(store, "a", input={"data_id": 7})
    await enqueue(store, "b", input={"instance_id": "i"}, is_train=False)
    await enqueue(store, "c", input="text")
    for name, state in (("b", SUCCEEDED), ("c", FAILED), ("a", SUCCEEDED)):
        await finish(store, name, state)
    first = await store.terminal_page(0, 2)
    rest = await store.terminal_page(first.next_after, 2)
    assert [(i.rollout_id, i.state, i.data_id, i.is_train) for i in [*first.items, *rest.items]] == [
        ("b", SUCCEEDED, "i", False),
        ("c", FAILED, "", True),
        ("a", SUCCEEDED, "7", True),
    ]
    assert (first.total_terminal, rest.next_after) == (3, 3)
    assert (await store.terminal_page(3, 2)).items == []


async def test_cursors_of_the_terminal_page_survive_deletions(store: Store) -> None:
    await enqueue(store, *"abcd")
    for name in "abc":
        await finish(store, name)
    seen = (await store.terminal_page(0, 2)).next_after
    for name in "abc":
        await store.delete_rollout(name)
    empty = await store.terminal_page(seen, 2)
    assert (empty.items, empty.next_after, empty.total_terminal) == ([], 3, 3)
    await finish(store, "d")
    assert [i.rollout_id for i in (await store.terminal_page(empty.next_after, 2)).items] == ["d"]


# leases and attempts


async def test_a_claim_takes_the_oldest_and_begins_their_attempts(store: Store) -> None:
    await enqueue(store, *"abc")
    granted = await store.claim("one", 2, 30)
    assert [(r.rollout_id, a, r.status.state, r.status.last_attempt_id) for r, a in granted] == [
        ("a", "0", RUNNING, "0"),
        ("b", "0", RUNNING, "0"),
    ]
    assert [r.rollout_id for r, _ in await store.claim("two", 5, 30)] == ["c"]
    assert await store.claim("two", 5, 30, held=["c"]) == []


async def test_concurrent_claims_never_grant_a_rollout_twice(store: Store) -> None:
    await enqueue(store, *(f"r{i}" for i in range(20)))
    grants = await asyncio.gather(*(store.claim(f"controller {i}", 3, 30) for i in range(10)))
    names = [rollout.rollout_id for granted in grants for rollout, _ in granted]
    assert sorted(names) == sorted(f"r{i}" for i in range(20))


async def test_a_lost_answer_is_granted_again_under_a_fresh_attempt(store: Store) -> None:
    await enqueue(store, *"ab")
    await store.claim("one", 2, 30)
    granted = await store.claim("one", 5, 30, held=["a"])
    assert [(r.rollout_id, a) for r, a in granted] == [("b", "1")]
    assert await store.attempt_state("b", "0") == "sealed"
    assert await store.attempt_state("b", "1") == "uncalled"
    assert await store.attempts("b") == ["0", "1"]


async def test_a_lease_that_ran_out_goes_to_the_next_controller(store: Store, clock: Clock) -> None:
    await enqueue(store, *"ab")
    await store.claim("one", 2, 30)
    clock.now_s += 20
    assert await store.renew("one", ["a"], 30) == []
    clock.now_s += 20
    assert [(r.rollout_id, a) for r, a in await store.claim("two", 5, 30)] == [("b", "1")]
    assert await store.renew("one", ["a", "b", "gone"], 30) == ["b", "gone"]


async def test_a_late_renewal_counts_while_nobody_else_has_claimed(store: Store, clock: Clock) -> None:
    await enqueue(store, "a")
    await store.claim("one", 1, 30)
    clock.now_s += 100
    assert await store.renew("one", ["a"], 30) == []
    assert await store.claim("two", 1, 30) == []


async def test_running_rollouts_without_a_lease_are_left_alone(store: Store, clock: Clock) -> None:
    await enqueue(store, "a")
    await store.patch_rollout("a", RolloutStatusPatch(state=RUNNING))
    clock.now_s += 10_000
    assert await store.claim("one", 5, 30) == []


async def test_ending_a_rollout_seals_its_attempts_and_releases_its_lease(store: Store, clock: Clock) -> None:
    await enqueue(store, "r")
    await store.claim("one", 1, 30)
    await store.patch_rollout("r", RolloutStatusPatch(state=FAILED))
    assert await store.attempt_state("r", "0") == "sealed"
    assert await store.attempt_state("r", "never begun") == "sealed"
    assert await store.renew("one", ["r"], 30) == ["r"]
    clock.now_s += 100
    assert await store.claim("one", 1, 30) == []
    with pytest.raises(ConflictError, match="is sealed: it takes no more calls"):
        await store.begin_call(intent("c", attempt_id="never begun"))


async def test_the_next_attempt_begins_once(store: Store) -> None:
    await enqueue(store, "r")
    await store.claim("one", 1, 30)
    assert await store.next_attempt("r", "one", "0") == "1"
    assert await store.next_attempt("r", "one", "0") == "1"
    assert await store.attempt_state("r", "0") == "sealed"
    assert (await store.get_rollout("r")).status.last_attempt_id == "1"
    with pytest.raises(ConflictError, match="Controller two does not hold rollout r"):
        await store.next_attempt("r", "two", "1")


async def test_an_attempt_is_called_as_soon_as_a_call_begins(store: Store) -> None:
    await enqueue(store, "r")
    assert await store.attempt_state("r", "0") == "uncalled"
    await store.begin_call(intent("c"))
    assert await store.attempt_state("r", "0") == "called"
    assert await store.attempt_state("r", "1") == "uncalled"
    with pytest.raises(NotFoundError):
        await store.attempt_state("other", "0")


async def test_sealing_twice_is_no_error(store: Store) -> None:
    await enqueue(store, "r")
    assert await store.attempt_state("r", "0") == "uncalled"
    await store.seal("r", "0")
    await store.seal("r", "0")
    assert await store.attempt_state("r", "0") == "sealed"
    assert await store.attempt_state("r", "1") == "uncalled"
    with pytest.raises(NotFoundError):
        await store.seal("other", "0")


async def test_attempts_known_from_events_and_calls_are_listed(store: Store) -> None:
    await enqueue(store, "r")
    await store.add_event("r", "late", "note", {})
    await store.begin_call(intent("c", attempt_id="early"))
    assert await store.attempts("r") == ["late", "early"]
    assert [c.info.call_id for c in await store.calls("r")] == ["c"], "without a claim the last begun is the last"


# events


async def test_events_come_back_oldest_first_and_only_of_the_last_attempt(store: Store, clock: Clock) -> None:
    await enqueue(store, "r")
    await store.claim("one", 1, 30)
    await store.add_event("r", "0", "note", {"n": 0})
    await store.next_attempt("r", "one", "0")
    first = await store.add_event("r", "1", "note", {"n": 1, "log": LARGE})
    clock.now_s += 1
    second = await store.add_event("r", "1", "reward", {"value": 0.5})
    assert await store.events("r") == [first, second]
    assert (first.timestamp, second.timestamp) == (1_000.0, 1_001.0)
    assert [event.data for event in await store.events("r", "0")] == [{"n": 0}]


async def test_an_event_sent_again_is_the_first_one(store: Store) -> None:
    await enqueue(store, "r", "s")
    first = await store.add_event("r", "0", "reward", {"value": 1}, "id")
    assert await store.add_event("r", "0", "reward", {"value": 2}, "id") == first
    elsewhere = await store.add_event("s", "0", "reward", {"value": 3}, "id")
    assert (elsewhere.data, len(await store.events("r"))) == ({"value": 3}, 1)


async def test_a_sealed_attempt_still_takes_its_reward(store: Store) -> None:
    await enqueue(store, "r")
    await store.seal("r", "0")
    await store.add_event("r", "0", "reward", {"value": 1})
    assert [event.event_type for event in await store.events("r")] == ["reward"]
    with pytest.raises(NotFoundError, match="There is no rollout other"):
        await store.add_event("other", "0", "reward", {})


# calls


async def test_a_call_reads_back_whole(store: Store, clock: Clock) -> None:
    await enqueue(store, "r")
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": LARGE}}]}
    await store.begin_call(intent("c", [image], kind="auxiliary", parent_id="p"))
    begun = (await store.calls("r"))[0].info
    assert (begun.committed, begun.commit_seq, begun.trainable, begun.reason) == (False, -1, False, None)
    item = commit("c", (5, 6, 7), (8, 9), usage={"total_tokens": 5}, side={"opaque": "x"}, retry_count=1)
    await store.commit_call(item)
    await store.mark_delivered("c")
    (call,) = await store.calls("r")
    assert call.request == {"model": "policy", "messages": [image]}
    assert (call.response, call.usage, call.side) == (item.response, item.usage, item.side)
    assert (call.upstream, call.latency_ms, call.retry_count) == (UPSTREAM, 12.5, 1)
    assert (call.created_at, call.info.finish_reason, call.info.http_status) == (clock.now_s, "stop", 200)
    assert (call.info.kind, call.info.parent_id, call.info.dialect) == ("auxiliary", "p", "chat")
    assert (call.info.committed, call.info.delivered, call.info.trainable) == (True, True, True)
    attempt_id, packed, incomplete = await store.packed_calls("r")
    (whole,) = unpack(packed)
    assert (attempt_id, incomplete, whole.info) == ("0", [], call.info)
    assert (whole.prompt_ids.tolist(), whole.sampled_ids.tolist()) == ([5, 6, 7], [8, 9])
    assert (whole.logprobs.tolist(), whole.spans) == (item.logprobs.tolist(), item.spans)


async def test_a_turn_is_stored_as_what_is_new(store: Store) -> None:
    await enqueue(store, "r")
    await record(store, "a", range(100), (200, 201), messages=["system", "user"])
    await record(store, "b", [*range(100), 200, 201, 300], (400,), messages=["system", "user", "answer", "tool"])
    _, packed, _ = await store.packed_calls("r")
    assert (packed[1].prompt.base_id, packed[1].prompt.keep, packed[1].prompt.tail.tolist()) == ("a", 102, [300])
    assert (await store.calls("r"))[1].request["messages"] == ["system", "user", "answer", "tool"]


async def test_the_experts_of_a_turn_are_stored_as_what_is_new(store: Store) -> None:
    await enqueue(store, "r")
    first: Experts = np.arange(16, dtype=np.uint8).reshape(4, 2, 2)
    second: Experts = np.arange(100, 128, dtype=np.uint8).reshape(7, 2, 2)
    for name, prompt, sampled, routed in (
        ("a", (1, 2, 3), (4, 5), first), ("b", (1, 2, 3, 4, 5, 6), (7, 8), second), ("c", (1, 2), (9,), None)
    ):  # fmt: skip
        await store.begin_call(intent(name))
        await store.commit_call(commit(name, prompt, sampled, routed=routed))
    a, b, c = unpack((await store.packed_calls("r"))[1])
    assert a.routing is not None
    assert b.routing is not None
    assert (b.routing.start, b.routing.tail.tolist()) == (4, second[4:].tolist())
    assert b.routing.whole().tolist() == [*first.tolist(), *second[4:].tolist()]
    assert c.routing is None


@pytest.mark.parametrize("layers", [0, 1])
async def test_experts_are_recorded_whole_where_the_call_before_has_none_or_those_of_another_model(
    store: Store, layers: int
) -> None:
    await enqueue(store, "r")
    other = np.zeros((3, layers, 2), np.uint8) if layers else None
    routed: Experts = np.arange(20, dtype=np.uint8).reshape(5, 2, 2)
    for name, prompt, sampled, told in (("a", (1, 2, 3), (4,), other), ("b", (1, 2, 3, 4), (5, 6), routed)):
        await store.begin_call(intent(name))
        await store.commit_call(commit(name, prompt, sampled, routed=told))
    a, b = unpack((await store.packed_calls("r"))[1])
    assert (a.routing is None) is (layers == 0)
    assert b.routing is not None
    assert b.routing.whole().tolist() == routed.tolist()


async def test_interleaved_branches_each_build_on_their_own_line(store: Store) -> None:
    await enqueue(store, "r")
    main, sub = list(range(50)), list(range(30, 90))
    for turn in range(3):
        await record(store, f"main{turn}", main, [1000 + turn])
        await record(store, f"sub{turn}", sub, [2000 + turn])
        main, sub = [*main, 1000 + turn, 7], [*sub, 2000 + turn, 7]
    _, packed, _ = await store.packed_calls("r")
    assert {item.info.call_id: (item.prompt.base_id, item.prompt.keep) for item in packed} == {
        "main0": (None, 0),
        "sub0": (None, 0),
        "main1": ("main0", 51),
        "sub1": ("sub0", 61),
        "main2": ("main1", 53),
        "sub2": ("sub1", 63),
    }
    assert [call.prompt_ids.size for call in unpack(packed)] == [50, 60, 52, 62, 54, 64]


async def test_packed_calls_come_in_order_of_commit_and_name_what_never_came_back(store: Store) -> None:
    await enqueue(store, "r")
    for name in ("a", "b", "c"):
        await store.begin_call(intent(name))
    await store.commit_call(commit("c"))
    await store.commit_call(commit("a"))
    _, packed, incomplete = await store.packed_calls("r")
    assert [(p.info.call_id, p.info.seq, p.info.commit_seq) for p in packed] == [("c", 2, 0), ("a", 0, 1)]
    assert incomplete == ["b"]
    assert [(c.info.call_id, c.packed is None) for c in await store.calls("r")] == [
        ("a", False),
        ("b", True),
        ("c", False),
    ]


async def test_a_call_without_ids_is_kept(store: Store) -> None:
    await enqueue(store, "r")
    await store.begin_call(intent("c"))
    await store.commit_call(commit("c", (), (), trainable=False, reason="no_prompt_ids", upstream=None))
    (call,) = unpack((await store.packed_calls("r"))[1])
    assert (call.prompt_ids.size, call.sampled_ids.dtype, call.info.reason) == (0, np.int32, "no_prompt_ids")


async def test_a_sealed_attempt_takes_no_calls_and_changes_nothing(store: Store) -> None:
    await enqueue(store, "r")
    await store.begin_call(intent("open"))
    await store.seal("r", "0")
    with pytest.raises(ConflictError, match=r"Attempt 0 of rollout r is sealed: it takes no more calls\."):
        await store.begin_call(intent("late"))
    with pytest.raises(ConflictError, match="is sealed"):
        await store.commit_call(commit("open"))
    assert (await store.packed_calls("r"))[1:] == ([], ["open"])


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda store: store.patch_rollout("r", RolloutStatusPatch(state=SUCCEEDED)), ConflictError),
        (lambda store: store.next_attempt("r", "one", "0"), ConflictError),
        (lambda store: store.delete_rollout("r"), NotFoundError),
    ],
)
async def test_calls_of_an_attempt_that_another_write_ended_are_refused(
    store: Store, end: Callable[[Store], Coroutine[Any, Any, object]], error: type[Exception], at_once: bool
) -> None:
    await enqueue(store, "r")
    await store.claim("one", 1, 30)
    await store.begin_call(intent("open"))
    late = (lambda: store.begin_call(intent("late"))), (lambda: store.commit_call(commit("open")))
    if at_once:
        outcomes = await asyncio.gather(end(store), *(call() for call in late), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes[1:]] == [error, error]
        return
    await end(store)
    for call in late:
        with pytest.raises(error):
            await call()


async def test_a_refused_first_call_leaves_nothing_that_the_next_builds_on(store: Store) -> None:
    await enqueue(store, "r", "s")
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(StoreError):
        await store.begin_call(intent("a", cycle))
    await record(store, "b", rollout_id="s")
    await record(store, "c")
    assert [call.info.call_id for call in await store.calls("r")] == ["c"]
    assert [call.info.call_id for call in await store.calls("s")] == ["b"]


async def test_unknown_and_repeated_calls_are_refused(store: Store) -> None:
    await enqueue(store, "r")
    with pytest.raises(NotFoundError, match="There is no rollout other"):
        await store.begin_call(intent("c", rollout_id="other"))
    with pytest.raises(NotFoundError, match="There is no call c"):
        await store.commit_call(commit("c"))
    await record(store, "c")
    with pytest.raises(ConflictError, match="Call c has begun already"):
        await store.begin_call(intent("c"))
    with pytest.raises(ConflictError, match="Call c is committed already"):
        await store.commit_call(commit("c"))
    await store.mark_delivered("unknown")


async def test_an_undelivered_call_is_not_trained_unless_a_later_call_continues_it(store: Store) -> None:
    await enqueue(store, "r")
    await store.begin_call(intent("a"))
    await store.commit_call(commit("a", (1, 2), (3,)))
    committed = (await store.calls("r"))[0].info
    assert (committed.trainable, committed.reason) == (False, "undelivered")
    await record(store, "b", (1, 2, 4), (5,))
    assert [(c.info.trainable, c.info.reason) for c in await store.calls("r")] == [(False, "undelivered"), (True, None)]
    await record(store, "c", (1, 2, 3), (6,))
    info = (await store.packed_calls("r"))[1][0].info
    assert (info.trainable, info.reason, info.delivered) == (True, None, False)


async def test_of_an_undelivered_call_and_its_retry_the_older_is_superseded(store: Store) -> None:
    await enqueue(store, "r")
    for name, sampled in (("a", (3,)), ("b", (4,))):
        await store.begin_call(intent(name, retry_key="key"))
        await store.commit_call(commit(name, (1, 2), sampled))
    await store.mark_delivered("b")
    assert [c.info.reason for c in await store.calls("r")] == ["superseded", None]
    await record(store, "c", (1, 2, 3, 9), (6,))
    assert [c.info.reason for c in await store.calls("r")] == [None, None, None], "the continued one was had after all"


async def test_the_same_request_answered_twice_is_two_calls(store: Store) -> None:
    await enqueue(store, "r")
    for name in ("a", "b"):
        await record(store, name, retry_key="key")
    assert [c.info.trainable for c in await store.calls("r")] == [True, True]


async def test_a_retry_finds_the_newest_call_with_its_key(store: Store) -> None:
    await enqueue(store, "r")
    await record(store, "a", messages=["one"], retry_key="key")
    await record(store, "b", messages=["one", "two"])
    await store.begin_call(intent("c", ["one", "two", "three"], retry_key="key"))
    found = await store.find_retry("r", "0", "key")
    assert found is not None
    assert (found.info.call_id, found.response, found.request["messages"]) == ("c", None, ["one", "two", "three"])
    await store.commit_call(commit("c", response={"answer": 1}))
    found = await store.find_retry("r", "0", "key")
    assert found is not None
    assert found.response == {"answer": 1}
    assert await store.find_retry("r", "1", "key") is None
    assert await store.find_retry("r", "0", "other") is None


async def test_one_conflict_among_concurrent_writes_undoes_no_other(store: Store) -> None:
    await enqueue(store, "r", "sealed")
    await store.seal("sealed", "0")
    outcomes = await asyncio.gather(
        *(store.begin_call(intent(f"c{i}", rollout_id="sealed" if i % 3 == 0 else "r")) for i in range(12)),
        return_exceptions=True,
    )
    assert [isinstance(outcome, ConflictError) for outcome in outcomes] == [i % 3 == 0 for i in range(12)]
    assert len(await store.calls("r")) == 8
    assert await store.calls("sealed") == []


# the policy and upkeep


async def test_a_checkpoint_recorded_twice_replaces_the_first(store: Store) -> None:
    first = CheckpointRecord(run_id="run", version="1.1", step=1, path="/a", rollout_ids=["r"])
    second = CheckpointRecord(run_id="run", version="1.2", step=2, path="/b", rollout_ids=[])
    other = CheckpointRecord(run_id="other", version="1.1", step=1, path="/c", rollout_ids=[])
    for record_ in (first, second, other, first.model_copy(update={"path": "/d"})):
        await store.record_checkpoint(record_)
    assert [c.path for c in await store.checkpoints("run")] == ["/d", "/b"]
    assert await store.checkpoints() == [first.model_copy(update={"path": "/d"}), second, other]


async def test_counts_tell_rollouts_by_state_and_calls_by_reason(store: Store) -> None:
    await enqueue(store, "r", "s")
    await finish(store, "s")
    await record(store, "a")
    await store.begin_call(intent("b"))
    for name, changes in (("c", {}), ("d", {"trainable": False, "reason": "no_logprobs"})):
        await store.begin_call(intent(name))
        await store.commit_call(commit(name, **changes))
    assert await store.counts() == {
        "rollouts.queuing": 1,
        "rollouts.running": 0,
        "rollouts.succeeded": 1,
        "rollouts.failed": 0,
        "calls.trainable": 1,
        "calls.incomplete": 1,
        "calls.undelivered": 1,
        "calls.no_logprobs": 1,
    }


async def test_pruning_deletes_the_oldest_finished_and_nothing_else(store: Store) -> None:
    names = [f"r{i:02}" for i in range(50)]
    await enqueue(store, "queued", *names)
    for name in reversed(names):
        await finish(store, name)
    assert await store.prune(keep_rollouts=3) == 47
    assert [r.rollout_id for r in await store.list_rollouts(list(RolloutState), 99)] == ["queued", "r00", "r01", "r02"]
    assert await store.prune(keep_rollouts=3) == 0


async def test_a_store_that_is_not_open_says_so(store: Store) -> None:
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match=r"The store .* is not open\. Open it first\."):
        await store.counts()
    await store.open()
    await store.open()
    assert (await store.counts())["calls.trainable"] == 0
