from __future__ import annotations

from typing import Any

import orjson
import pytest

from agl_runtime.gateway.dialects import all_dialects
from agl_runtime.gateway.internal import CallRefused, ModelRequest
from agl_runtime.gateway.prepare import prepare
from agl_runtime.schemas import Mode, Model
from fakes.running_gateway import config

RECORD = config(train={"temperature": 1.0}, eval={"temperature": 0.2})
REFUSE = config(gateway={"distribution_params": "refuse"})
MESSAGES = [{"role": "user", "content": "hi"}]
SERVER = Model(model="policy", endpoint="http://127.0.0.1:1/v1", version=7, run_epoch=2)
PLAIN = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


def chat(**body: Any) -> ModelRequest:
    return all_dialects()["openai/v1/chat/completions"].parse({"messages": MESSAGES, **body})


def text(**body: Any) -> ModelRequest:
    return all_dialects()["openai/v1/completions"].parse({"prompt": "hi", **body})


def sent(request: ModelRequest, mode: Mode = "train") -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(prepare(request, mode, RECORD).dump(SERVER, {}))
    return body


def test_training_forces_temperature_ids_and_logprobs() -> None:
    body = sent(chat(model="gpt-4o", temperature=0.0, logprobs=False, max_tokens=9))
    assert body == {
        "messages": MESSAGES,
        "model": "policy",
        "temperature": 1.0,
        "logprobs": True,
        "return_token_ids": True,
        "max_tokens": 9,
        "cache_salt": "2.7",
        **PLAIN,
    }


def test_validation_has_its_own_temperature_and_asks_for_no_logprobs() -> None:
    body = sent(chat(), "val")
    assert (body["temperature"], body["return_token_ids"], "logprobs" in body) == (0.2, True, False)


@pytest.mark.parametrize("mode", ["train", "val"])
@pytest.mark.parametrize("ask", [chat, text])
def test_the_whole_distribution_is_asked_for_whatever_the_model_servers_defaults_are(ask: Any, mode: Mode) -> None:
    body = sent(ask(top_p=0.5, min_p=None), mode)
    assert {name: body[name] for name in PLAIN} == PLAIN | {"top_p": 0.5}
    assert prepare(ask(**PLAIN), "train", RECORD).changed_params == ()
    assert prepare(ask(top_k=0), "train", RECORD).changed_params == ()


def test_a_prefix_that_older_weights_left_in_a_cache_is_not_asked_for() -> None:
    prepared = prepare(chat(), "train", RECORD)
    salts = [
        orjson.loads(prepared.dump(SERVER.model_copy(update={"version": version}), {}))["cache_salt"]
        for version in (7, 8)
    ]
    assert salts == ["2.7", "2.8"]
    assert sent(chat(cache_salt="a user's"))["cache_salt"] == "2.7 a user's"


@pytest.mark.parametrize(("asked", "expected"), [(None, 1), (0, 1), (5, 5), (True, 1)])
def test_a_completion_asks_for_at_least_one_logprob(asked: Any, expected: int) -> None:
    assert sent(text(logprobs=asked))["logprobs"] == expected


def test_a_stream_always_ends_with_its_usage() -> None:
    body = sent(chat(stream=True, stream_options={"include_usage": False, "continuous_usage_stats": True}))
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_the_harnesss_own_body_is_left_as_it_is() -> None:
    request = chat(temperature=0.5, stream=True)
    prepare(request, "train", RECORD)
    assert request.original == {"messages": MESSAGES, "temperature": 0.5, "stream": True}


def test_parameters_that_change_the_distribution_are_recorded_or_refused() -> None:
    assert prepare(chat(top_p=0.5), "train", RECORD).changed_params == ("top_p",)
    with pytest.raises(CallRefused, match="top_p would change the distribution") as caught:
        prepare(chat(top_p=0.5), "train", REFUSE)
    assert caught.value.http_status == 400
    assert prepare(chat(top_p=0.5), "val", REFUSE).body["top_p"] == 0.5


def test_instructions_of_a_developer_are_told_under_the_name_that_templates_know() -> None:
    told = [{"role": "developer", "content": "a"}, *MESSAGES, {"role": "system", "content": "b"}]
    request = chat(messages=told)
    assert [message["role"] for message in sent(request)["messages"]] == ["system", "user", "system"]
    assert request.original["messages"] == told


@pytest.mark.parametrize("mode", ["train", "val"])
def test_with_routing_replay_training_asks_for_whole_answers_as_streams_tell_no_experts(mode: Mode) -> None:
    settings = config(train={"backend": "verl", "routing_replay": True})
    prepared = prepare(chat(stream=True, stream_options={"include_usage": True}), mode, settings)
    assert prepared.streams is (mode == "val")
    assert {"stream", "stream_options"} & prepared.body.keys() == (
        {"stream", "stream_options"} if mode == "val" else set()
    )
    assert not prepare(chat(), mode, settings).streams
