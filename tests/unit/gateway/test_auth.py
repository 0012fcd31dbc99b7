"""Keys and what they open, without a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_runtime.gateway.auth import Caller, agent_key, identify, judge, judge_event

ADMIN = "agl-admin-secret"
OWN = "/proxy/rollout/r1/attempt/0/mode/train"
PROXY = f"{OWN}/openai/v1/chat/completions"
COUNT = f"{OWN}/anthropic/v1/messages/count_tokens"
HELLO = f"{OWN}/anthropic/api/hello"
EVENTS = "/api/rollouts/r1/attempt/0/events"
AGENT = Caller("agent", "r1", "0", "train")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_admin_key_is_known_by_either_header() -> None:
    assert identify(ADMIN, bearer(ADMIN)) == Caller("admin")
    assert identify(ADMIN, {"x-api-key": ADMIN}) == Caller("admin")
    assert identify(ADMIN, {"authorization": "Bearer other", "x-api-key": ADMIN}) == Caller("admin")


@pytest.mark.parametrize("mode", ["train", "val"])
def test_an_agents_key_names_its_rollout_attempt_and_mode(mode: str) -> None:
    key = agent_key(ADMIN, "task.1:é", "3", mode)  # type: ignore[arg-type]
    assert identify(ADMIN, bearer(key)) == Caller("agent", "task.1:é", "3", mode)  # type: ignore[arg-type]


def test_an_agents_key_of_another_gateway_is_unknown() -> None:
    assert identify(ADMIN, bearer(agent_key("another", "r1", "0", "train"))) is None


def test_a_key_whose_names_were_changed_is_unknown() -> None:
    names, mac = agent_key(ADMIN, "r1", "0", "train").split(".")
    other, _ = agent_key(ADMIN, "r2", "0", "train").split(".")
    assert identify(ADMIN, bearer(f"{names}.{mac}")) is not None
    assert identify(ADMIN, bearer(f"{other}.{mac}")) is None


@given(st.text(max_size=60))
def test_no_other_text_is_a_key(text: str) -> None:
    for headers in ({"authorization": text}, bearer(text), {"x-api-key": text}, bearer(f"agl-agent-{text}")):
        assert identify(ADMIN, headers) is None


def test_without_a_key_only_health_a_hello_and_the_description_are_open() -> None:
    assert judge(None, "GET", "/healthz") is None
    assert judge(None, "GET", "/openapi.json") is None
    assert judge(None, "HEAD", HELLO) is None
    assert judge(None, "POST", HELLO) is not None
    for path in (HELLO + "/x", "/metrics", "/api/rollouts", PROXY, EVENTS, "/docs", "/healthz/"):
        denial = judge(None, "GET", path)
        assert denial is not None
        assert denial.status == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", PROXY), ("POST", COUNT), ("GET", HELLO), ("POST", EVENTS)]
    + [("GET", f"{OWN}/{api}/v1/models") for api in ("openai", "anthropic")],
)
def test_an_agent_reaches_its_own_paths(method: str, path: str) -> None:
    assert judge(AGENT, method, path) is None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", PROXY.replace("r1", "r2")),
        ("POST", PROXY.replace("attempt/0", "attempt/1")),
        ("POST", PROXY.replace("train", "val")),
        ("POST", EVENTS.replace("r1", "r2")),
        ("POST", EVENTS.replace("attempt/0", "attempt/1")),
        ("GET", EVENTS),
        ("GET", "/api/rollouts/r1/events"),
        ("GET", "/api/rollouts/r1"),
        ("POST", "/proxy/pause"),
        ("POST", "/api/models"),
        ("GET", "/metrics"),
        ("POST", "/a/route/added/later"),
    ],
)
def test_an_agent_reaches_nothing_else(method: str, path: str) -> None:
    denial = judge(AGENT, method, path)
    assert denial is not None
    assert denial.status == 403
    assert denial.sentence.endswith(".")


def test_the_admin_reaches_every_path() -> None:
    assert judge(Caller("admin"), "POST", "/proxy/pause") is None
    assert judge(Caller("admin"), "POST", PROXY) is None


def test_an_agent_posts_custom_events_and_a_reward_only_where_it_may() -> None:
    assert judge_event(AGENT, "note", may_reward=False) is None
    assert judge_event(AGENT, "reward", may_reward=True) is None
    refused = judge_event(AGENT, "reward", may_reward=False)
    assert refused is not None
    assert "agent.reports_reward" in refused.sentence
    for reserved in ("model_request", "agent_exit", "upstream_failure"):
        assert judge_event(AGENT, reserved, may_reward=True) is not None
        assert judge_event(Caller("admin"), reserved, may_reward=False) is None
