from __future__ import annotations

from agl_runtime.gateway.registry import RECOVERY_S, Registry
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
    assert ENDPOINTS[0] not in during.values()
    assert all(during[name] == before[name] for name in ROLLOUTS if before[name] != ENDPOINTS[0])
    clock.now += RECOVERY_S
    assert routes(reg) == before


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
