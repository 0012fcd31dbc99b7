from __future__ import annotations

import json

import pytest

from agl_runtime.trainer.backends.verl.records import GroupRecord, scores_of
from agl_runtime.trainer.scoring import Candidate, score
from fakes.trained import make_ended, make_samples

GROUPS = {
    "mixed": [(1.0, 1), (0.0, 3), (None, 2), (0.5, 0)],
    "flat": [(1.0, 1), (1.0, 2)],
    "failed": [(None, 1), (None, 0)],
    "silent": [(1.0, 0), (0.0, 0)],
}


def record(uid: str) -> GroupRecord:
    members = GROUPS[uid]
    ended = [make_ended(f"{uid}-{i}", reward) for i, (reward, _) in enumerate(members)]
    built = [make_samples(f"{uid}-{i}", rows) for i, (_, rows) in enumerate(members)]
    return GroupRecord.of(uid, 7, "1.3", ended, built)


def test_a_record_survives_the_way_through_an_event() -> None:
    sent = record("mixed")
    assert GroupRecord.parse(json.loads(json.dumps(sent.event()))) == sent


def test_records_count_what_scoring_counts() -> None:
    expected = score(
        [
            Candidate(uid, reward, make_samples(f"{uid}-{i}", rows))
            for uid, members in GROUPS.items()
            for i, (reward, rows) in enumerate(members)
        ],
        "grpo",
    )
    told = scores_of(map(record, GROUPS))
    assert told.totals == expected.totals
    assert told.report == expected.report
    assert (told.groups, told.groups_without_spread) == (expected.groups, expected.groups_without_spread)


@pytest.mark.parametrize(("uid", "teaches"), [("mixed", True), ("flat", False), ("failed", False), ("silent", False)])
def test_a_group_teaches_only_where_rewards_differ_and_there_are_tokens_to_train(uid: str, teaches: bool) -> None:
    assert record(uid).teaches(flat_trains=False) is teaches


def test_without_groups_equal_rewards_teach_too_but_not_without_tokens() -> None:
    assert record("flat").teaches(flat_trains=True)
    assert not record("silent").teaches(flat_trains=True)
