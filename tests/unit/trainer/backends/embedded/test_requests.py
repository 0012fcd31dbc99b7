from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_runtime.trainer.backends.embedded.codec import Codec
from agl_runtime.trainer.backends.embedded.refusal import RequestRefused
from agl_runtime.trainer.backends.embedded.requests import Limits, Order, read_chat, read_completion
from agl_runtime.trainer.backends.embedded.sampling import SamplingParams
from fakes.tiny_model import CALCULATOR

LIMITS = Limits(model="policy", max_tokens=64, context=128, vocabulary=302)
HELLO = [{"role": "user", "content": "Hello"}]


def chat(codec: Codec, messages: list[Any] | None = None, **changes: Any) -> Order:
    return read_chat({"model": "policy", "messages": messages or HELLO, **changes}, codec, LIMITS)


def rendered(codec: Codec, messages: list[Any], **changes: Any) -> str:
    return codec.decode(chat(codec, messages, **changes).prompts[0])


def refusal(codec: Codec, messages: list[Any] | None = None, **changes: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        chat(codec, messages, **changes)
    return caught.value


def test_defaults_sample_the_unchanged_distribution_up_to_the_servers_limit(codec: Codec) -> None:
    order = chat(codec)
    assert order.params == (SamplingParams(max_tokens=64),)
    assert (order.n, order.seed, order.stops, order.stream, order.logprobs, order.token_ids) == (
        *(1, None, ()),
        *(False, False, False),
    )


def test_everything_that_can_be_honoured_is(codec: Codec) -> None:
    order = chat(
        codec,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        max_completion_tokens=7,
        n=3,
        seed=11,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        return_token_ids=True,
        tools=[CALCULATOR],
        tool_choice="auto",
        parallel_tool_calls=False,
    )
    assert order.params == (SamplingParams(max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, top_logprobs=2),)
    assert (order.n, order.seed, order.stops, order.closers) == (3, 11, ("a", "b"), ("</tool_call>",))
    assert all((order.stream, order.usage_chunk, order.logprobs, order.token_ids, order.tools))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 10}),
        ("response_format", {"type": "json_object"}),
        ("min_p", 0.1),
        ("best_of", 2),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "calculator"}}),
        ("temperature", -1),
        ("temperature", 0.001),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("n", 0),
        ("max_tokens", 0),
        ("top_logprobs", 21),
        ("top_logprobs", 2),
        ("stop", [""]),
        ("seed", "x"),
        ("tools", [{"type": "web_search"}]),
        ("messages", []),
        ("model", "other"),
        ("no_such_thing", 1),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(codec: Codec, name: str, value: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_chat({"model": "policy", "messages": HELLO, name: value}, codec, LIMITS)
    assert caught.value.param == name
    assert name in str(caught.value) or name == "model"
    assert caught.value.body()["error"]["param"] == name


def test_an_unknown_parameter_says_so(codec: Codec) -> None:
    error = refusal(codec, no_such_thing=1)
    assert str(error) == "Unknown parameter: no_such_thing. Leave it out."
    assert error.body()["error"]["code"] == "unknown_parameter"


def test_values_that_ask_for_nothing_and_nulls_are_accepted(codec: Codec) -> None:
    neutral = {"presence_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}, "best_of": 1}
    assert chat(codec, user="me", metadata={"a": "b"}, temperature=None, tools=None, top_k=-1, **neutral) == chat(codec)


def test_tools_are_told_to_the_model_unless_tool_choice_is_none(codec: Codec) -> None:
    assert "tools: calculator" in rendered(codec, HELLO, tools=[CALCULATOR])
    order = chat(codec, tools=[CALCULATOR], tool_choice="none")
    assert "calculator" not in codec.decode(order.prompts[0])
    assert not order.tools


def test_sampled_arguments_are_rendered_again_byte_for_byte(codec: Codec) -> None:
    arguments = '{"expression":   "1+2"}'
    call = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
    text = rendered(codec, [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert arguments in text
    assert "None" not in text


def test_tools_that_the_template_has_no_place_for_are_told_of_once(
    policy: Any, codec: Codec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codec.render(HELLO, [CALCULATOR], {})
    assert caplog.messages == []
    monkeypatch.setattr(policy.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    plain = Codec(policy.tokenizer, policy.stop_ids)
    for _ in range(2):
        plain.render(HELLO, [CALCULATOR], {})
    assert caplog.messages == [
        "the chat template has no place for tools: the model is not told of those that agents offer"
    ]


def test_a_template_that_takes_parsed_arguments_gets_them(policy: Any) -> None:
    tokenizer = policy.tokenizer
    whole = tokenizer.chat_template
    tokenizer.chat_template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    try:
        codec = Codec(tokenizer, policy.stop_ids)
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
        ids = codec.render([{"role": "assistant", "content": "", "tool_calls": [call]}], [], {})
    finally:
        tokenizer.chat_template = whole
    assert codec.decode(ids) == '{"a": 1}'


def test_text_parts_are_joined_and_developer_is_system(codec: Codec) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = rendered(codec, [{"role": "developer", "content": "Rules"}, {"role": "user", "content": parts}])
    assert text.startswith("<|im_start|>system\nRules")
    assert "one\ntwo" in text


def test_a_cache_mark_and_one_text_part_render_as_the_plain_text(codec: Codec) -> None:
    marked = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [marked], "cache_control": {"type": "ephemeral"}}]
    assert rendered(codec, messages) == rendered(codec, [{"role": "user", "content": "one"}])


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role must be one of"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content must be text"),
        ({"role": "user", "content": 5}, "messages[0].content must be text"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls must be function calls"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(codec: Codec, message: dict[str, Any], what: str) -> None:
    error = refusal(codec, [message])
    assert what in str(error)
    assert error.param == "messages"


def test_what_the_chat_template_refuses_is_the_requests_fault(codec: Codec) -> None:
    error = refusal(codec, chat_template_kwargs={"messages": []})
    assert error.status == 400
    assert error.param == "messages"


def test_max_tokens_is_lowered_to_the_servers_limit_and_to_what_the_context_leaves(codec: Codec) -> None:
    assert chat(codec, max_tokens=9999).params[0].max_tokens == 64
    long = read_completion({"model": "policy", "prompt": [5] * 100, "max_tokens": 50}, codec, LIMITS)
    assert long.params[0].max_tokens == 28


def test_a_prompt_that_fills_the_context_is_refused_with_its_code(codec: Codec) -> None:
    error = refusal(codec, [{"role": "user", "content": "x" * 200}])
    assert error.code == "context_length_exceeded"
    assert "maximum context length is 128 tokens" in str(error)


def test_completions_take_text_ids_and_lists_of_them(codec: Codec) -> None:
    def prompts(prompt: Any) -> list[list[int]]:
        order = read_completion({"model": "policy", "prompt": prompt}, codec, LIMITS)
        return [list(ids) for ids in order.prompts]

    ids = codec.encode("ab", special=True)
    assert prompts("ab") == prompts(["ab"]) == prompts(ids) == prompts([ids]) == [ids]
    assert prompts(["ab", "c"]) == [ids, codec.encode("c", special=True)]


@pytest.mark.parametrize("prompt", ["", [], [[]], [302], [-1]])
def test_a_prompt_without_known_tokens_is_refused(codec: Codec, prompt: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_completion({"model": "policy", "prompt": prompt}, codec, LIMITS)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("body", [None, [], "text"])
def test_a_body_that_is_no_object_is_refused(codec: Codec, body: Any) -> None:
    with pytest.raises(RequestRefused, match="must be a JSON object"):
        read_chat(body, codec, LIMITS)


odd = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "user", "tool", "text", "function", "{}"])
shapes = st.recursive(
    odd,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "function", "name", "arguments", "role", "content"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
odd_messages = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name", "tool_call_id"]), shapes)
    | st.fixed_dictionaries({"role": st.just("assistant")}, optional={"content": shapes, "tool_calls": shapes})
    | shapes,
    max_size=3,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=odd_messages, extra=st.dictionaries(st.sampled_from(["tools", "tool_choice", "stop"]), shapes))
def test_any_shape_of_messages_is_read_or_refused(codec: Codec, messages: Any, extra: dict[str, Any]) -> None:
    with contextlib.suppress(RequestRefused):
        read_chat({"model": "policy", "messages": messages, **extra}, codec, LIMITS)


@pytest.mark.parametrize("role", [["a"], {}, 7, None, "nobody"])
def test_a_role_that_is_none_is_named(codec: Codec, role: Any) -> None:
    assert "messages[0].role must be one of" in refusal(codec, [{"role": role, "content": "x"}]).what


def test_an_agent_brings_no_template_of_its_own(codec: Codec) -> None:
    refused = refusal(codec, chat_template_kwargs={"chat_template": "{{ 1 }}"})
    assert refused.what == "chat_template_kwargs cannot hold chat_template."


def test_messages_nested_deeper_than_a_template_can_write_are_refused(codec: Codec) -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert "The chat template refuses these messages" in refusal(codec, tools=[tool]).what


class Unused(Codec):
    """A codec that must not be asked."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "x" * 10_000}]},
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "x": ["y" * 10_000]}}]},
    ],
)
def test_a_conversation_that_cannot_fit_is_refused_unread(body: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_chat({"model": "policy", **body}, Unused(), LIMITS)
    assert (caught.value.code, caught.value.status) == ("context_length_exceeded", 400)


@pytest.mark.parametrize("prompt", ["x" * 10_000, ["a", "x" * 10_000], [1] * 10_000, [[1], [1] * 10_000]])
def test_a_prompt_that_cannot_fit_is_refused_unread(prompt: Any) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_completion({"model": "policy", "prompt": prompt}, Unused(), LIMITS)
    assert caught.value.code == "context_length_exceeded"


class Listening(Codec):
    """A codec that keeps what its template is told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def render(self, messages: Any, tools: Any, template: Any) -> list[int]:
        self.told.append(template)
        return [1]


def test_the_reasoning_effort_is_a_word_for_the_template() -> None:
    codec = Listening()
    chat(codec, reasoning_effort="low")
    chat(codec, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    chat(codec)
    assert codec.told == [{"reasoning_effort": "low"}, {"reasoning_effort": "high"}, {}]
