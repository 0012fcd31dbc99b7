from __future__ import annotations

from collections import Counter

import pytest

from agl_runtime.gateway.registry import LONGEST_RECOVERY_S, RECOVERY_S, Registry
from agl_runtime.schemas import Model

ENDPOINTS = [f"http://m{i}/v1" for i in range(4)]
ROLLOUTS = [f"r{i}" for i in range(200)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def registry(clock: Clock | None = None) -> Registry:
    made = Registry("policy", clock=clock or Clock())
    made.register([Model(model="policy", endpoint=endpoint) for endpoint in ENDPOINTS])
    return made


def routes(reg: Registry) -> dict[str, str]:
    return {name: model.endpoint for name in ROLLOUTS if (model := reg.route("policy", name))}


def test_a_rollout_stays_at_its_endpoint_and_all_endpoints_are_used() -> None:
    first = routes(registry())
    assert first == routes(registry())
    assert set(first.values()) == set(ENDPOINTS)


def test_only_the_rollouts_of_a_failing_endpoint_move_and_they_come_back() -> None:
    clock = Clock()
    reg = registry(clock)
    before = routes(reg)
    reg.report_failure(Model(model="policy", endpoint=ENDPOINTS[0]))
    during = routes(reg)
    moved = Counter(during[name] for name in ROLLOUTS if before[name] == ENDPOINTS[0])
    assert set(moved) == set(ENDPOINTS[1:])
    assert max(moved.values()) < 0.6 * moved.total()
    assert all(during[name] == before[name] for name in ROLLOUTS if before[name] != ENDPOINTS[0])
    clock.now += RECOVERY_S
    assert routes(reg) == before


def test_an_endpoint_that_stays_dead_is_left_alone_for_longer_each_time() -> None:
    clock = Clock()
    reg, model = registry(clock), Model(model="policy", endpoint=ENDPOINTS[0])
    (pinned, *_) = [name for name, endpoint in routes(reg).items() if endpoint == ENDPOINTS[0]]
    waits = []
    for _ in range(6):
        since = clock.now
        for _ in range(3):  # calls that were under way together
            reg.report_failure(model)
        while routes(reg)[pinned] != ENDPOINTS[0]:
            clock.now += RECOVERY_S
        waits.append(clock.now - since)
    assert waits == [RECOVERY_S * times for times in (1, 2, 4, 8, 16, 16)]
    assert waits[-1] == LONGEST_RECOVERY_S


@pytest.mark.parametrize("is_registered_anew", [True, False])
def test_an_endpoint_that_was_well_again_begins_with_a_short_wait(is_registered_anew: bool) -> None:
    clock = Clock()
    reg, model = registry(clock), Model(model="policy", endpoint=ENDPOINTS[0])
    before = routes(reg)
    reg.report_failure(model)
    if is_registered_anew:
        reg.register([model])
        assert routes(reg) == before
    else:
        clock.now += 3 * RECOVERY_S
    reg.report_failure(model)
    clock.now += RECOVERY_S
    assert routes(reg) == before


def test_a_new_endpoint_takes_its_share_and_moves_no_rollout_between_the_others() -> None:
    reg = registry()
    before = routes(reg)
    reg.register([Model(model="policy", endpoint="http://new/v1")])
    moved = {name: endpoint for name, endpoint in routes(reg).items() if endpoint != before[name]}
    assert set(moved.values()) == {"http://new/v1"}
    assert 0 < len(moved) < len(ROLLOUTS) / 2


def test_when_every_endpoint_fails_there_is_still_a_route() -> None:
    reg = registry()
    for endpoint in ENDPOINTS:
        reg.report_failure(Model(model="policy", endpoint=endpoint))
    assert len(routes(reg)) == len(ROLLOUTS)


def test_an_unknown_name_means_the_policy_and_a_registered_one_itself() -> None:
    reg = registry()
    reg.register([Model(model="judge", endpoint="http://j/v1")])
    assert reg.resolve("gpt-4o") == "policy"
    assert reg.resolve("judge") == "judge"
    assert reg.names() == ["policy", "judge"]


@pytest.mark.parametrize(
    ("asked", "meant", "server"),
    [
        ("claude-haiku-4-5", "side", "policy"),
        ("gpt-5-codex", "policy", "policy"),
        ("gpt-5", "judge", "judge"),
        ("other", "other", "policy"),
        ("judge", "judge", "judge"),
        ("policy", "policy", "policy"),
        ("", "policy", "policy"),
    ],
)
def test_the_first_pattern_that_fits_says_what_a_name_means(asked: str, meant: str, server: str) -> None:
    reg = Registry("policy", {"*haiku*": "side", "*codex*": "policy", "gpt-*": "judge"})
    reg.register([Model(model=name, endpoint=f"http://{name}/v1") for name in ("policy", "judge")])
    assert (reg.meant(asked), reg.resolve(asked)) == (meant, server)


def test_the_configured_name_means_the_policy_under_whatever_name_it_is_served() -> None:
    reg = Registry("policy", {"gpt-*": "policy"})
    reg.register([Model(model="Qwen/Qwen3-8B", endpoint="http://m/v1")])
    assert [reg.meant(name) for name in ("policy", "gpt-5", "Qwen/Qwen3-8B")] == ["Qwen/Qwen3-8B"] * 3


def test_where_the_configured_name_is_not_registered_the_first_is_the_policy() -> None:
    reg = Registry("policy")
    reg.register([Model(model="Qwen/Qwen3-8B", endpoint="http://m/v1")])
    assert (reg.policy, reg.resolve("anything")) == ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")


def test_registering_again_replaces_the_version() -> None:
    reg = registry()
    newer = Model(model="policy", endpoint=ENDPOINTS[0], version=5)
    reg.register([newer])
    assert reg.current(Model(model="policy", endpoint=ENDPOINTS[0])) == newer
    assert len(reg.models()) == len(ENDPOINTS)


def test_without_models_there_is_no_route() -> None:
    reg = registry()
    reg.clear()
    assert reg.route("policy", "r1") is None
    assert reg.models() == []
