"""What the model server is sent for a request of the Responses API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agl_runtime.gateway.dialects.reasoning import seal, unseal
from agl_runtime.gateway.dialects.responses import ResponsesDialect
from agl_runtime.gateway.internal import CallRefused, ModelRequest

USER = {"role": "user", "content": "hi"}
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True, "description": None}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches."}
FS = {"type": "namespace", "name": "mcp__fs", "description": "Files.", "tools": [{**ADD, "name": "read"}]}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}


def parse(**body: Any) -> ModelRequest:
    return ResponsesDialect().parse({"model": "m", "input": "hi", **body})


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = parse(input=list(items)).body["messages"]
    return read


def refusal(**body: Any) -> str:
    with pytest.raises(CallRefused) as caught:
        parse(**body)
    assert caught.value.http_status == 400
    return str(caught.value)


def call(name: str = "add", arguments: str = "{}", call_id: str = "c1", **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **fields}


def chat_call(name: str = "add", arguments: str = "{}", call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def output(value: Any, call_id: str = "c1", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, "output": value}


def test_a_text_with_instructions() -> None:
    request = parse(instructions="be brief", max_output_tokens=5, temperature=0.5, metadata={"a": "b"}, made_up=1)
    assert request.body == {
        "messages": [{"role": "system", "content": "be brief"}, USER],
        "max_tokens": 5,
        "temperature": 0.5,
    }
    assert (request.dialect, request.operation, request.model) == ("responses", "chat/completions", "m")


def test_every_role_stands_where_it_was_sent() -> None:
    talk = [{"role": role, "content": role} for role in ("developer", "user", "assistant", "system", "user")]
    assert messages(*talk) == talk


def test_what_one_answer_consists_of_is_one_assistant_message() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": seal("resp_1", "hm\n")}
    read = messages(USER, thought, said, call(), call("add", '{"a": 1}', "c2"), output("1"), output("2", "c2"), thought)
    assert read == [
        USER,
        {
            "role": "assistant",
            "content": "so",
            "reasoning_content": "hm\n",
            "tool_calls": [chat_call(), chat_call("add", '{"a": 1}', "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "", "reasoning_content": "hm\n"},
    ]


def test_answers_in_a_row_stay_apart() -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}], "summary": []}
    said = {"role": "assistant", "content": "b"}
    assert [message.get("reasoning_content") for message in messages(USER, thought, said, said, thought, call())] == [
        None,
        "a",
        None,
        "a",
    ]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"encrypted_content": seal("resp_1", "é \n"), "content": [{"text": "other"}]}, "é \n"),
        ({"encrypted_content": "gAAAA", "content": [{"text": "a"}, {"text": "b"}]}, "ab"),
        ({"encrypted_content": None, "summary": [{"text": "a"}, {"text": "b"}]}, "a\n\nb"),
    ],
)
def test_reasoning_goes_back_by_what_is_nearest_to_the_original(item: dict[str, Any], text: str) -> None:
    assert messages({"type": "reasoning", **item}, USER)[0]["reasoning_content"] == text


def test_reasoning_that_only_its_vendor_can_read_is_left_out_and_named() -> None:
    request = parse(input=[USER, {"type": "reasoning", "encrypted_content": "gAAAA", "summary": []}])
    assert request.body["messages"] == [USER]
    assert request.side["unreadable_reasoning"] == ["input[1]"]


@pytest.mark.parametrize(
    "broken", ["agl2.", "agl2.é", "agl2.AAAA", seal("r", "abc")[:-4], "agl2." + seal("r", "a")[6:], None, 5]
)
def test_a_seal_that_was_touched_is_none(broken: Any) -> None:
    assert unseal(broken) is None


def test_images_go_along_also_in_the_result_of_a_tool() -> None:
    text = {"type": "input_text", "text": "see"}
    read = messages(
        {"role": "user", "content": [text, {**IMAGE, "detail": "high"}]},
        call(),
        output([text, IMAGE]),
        call(call_id="c2"),
        output([text], "c2"),
    )
    shown = {"url": IMAGE["image_url"]}
    chat_text = {"type": "text", "text": "see"}
    assert read[0]["content"] == [chat_text, {"type": "image_url", "image_url": {**shown, "detail": "high"}}]
    assert read[2]["content"] == [chat_text, {"type": "image_url", "image_url": shown}]
    assert read[4]["content"] == "see"


def test_tools_become_functions() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    body = parse(tools=[ADD, {**PATCH, "format": lark}, FS], tool_choice="auto", parallel_tool_calls=False).body
    add, patch, read = (tool["function"] for tool in body["tools"])
    assert add == {"name": "add", "parameters": {"type": "object"}, "strict": True}
    assert patch["description"] == "Patches.\nThe input must follow this lark grammar:\nstart: /.+/"
    assert list(patch["parameters"]["properties"]) == ["input"]
    assert (read["name"], read["description"]) == ("mcp__fs__read", "Files.")
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("auto", False)


def test_tools_within_the_input_are_offered_too_and_the_later_definition_counts() -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [PATCH, {**ADD, "description": "new"}]}
    request = parse(input=[more, USER], tools=[ADD])
    assert request.body["messages"] == [USER]
    assert [tool["function"]["name"] for tool in request.body["tools"]] == ["add", "apply_patch"]
    assert request.body["tools"][0]["function"]["description"] == "new"


def test_tools_that_nobody_here_can_run_are_left_out_and_named() -> None:
    gone = [{"type": "web_search"}, {"type": "mcp", "server_label": "s"}, {"type": "tool_search"}, {"type": "new"}, {}]
    request = parse(tools=gone, tool_choice="auto")
    assert request.side["left_out"] == ["web_search", "mcp s", "tool_search", "new", "None"]
    assert set(request.body) == {"messages"}


def test_what_no_chat_api_knows_is_left_out_and_named() -> None:
    request = parse(top_logprobs=5, truncation="auto", max_tool_calls=None)
    assert request.side["left_out"] == ["top_logprobs", "truncation"]
    assert "left_out" not in parse(top_logprobs=0, truncation="disabled").side


def test_an_image_in_what_the_assistant_said_is_not_lost() -> None:
    (said,) = messages({"role": "assistant", "content": [IMAGE]})
    assert said["content"] == [{"type": "image_url", "image_url": {"url": IMAGE["image_url"]}}]


@pytest.mark.parametrize(
    ("choice", "names", "chat_choice"),
    [
        ("required", ["add", "apply_patch", "mcp__fs__read"], "required"),
        (
            {"type": "custom", "name": "apply_patch"},
            ["add", "apply_patch", "mcp__fs__read"],
            {"type": "function", "function": {"name": "apply_patch"}},
        ),
        (
            {"type": "function", "name": "read", "namespace": "mcp__fs"},
            ["add", "apply_patch", "mcp__fs__read"],
            {"type": "function", "function": {"name": "mcp__fs__read"}},
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
            ["add"],
            "required",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "mcp__fs"}]},
            ["mcp__fs__read"],
            "auto",
        ),
    ],
)
def test_the_choice_of_a_tool(choice: Any, names: list[str], chat_choice: Any) -> None:
    body = parse(tools=[ADD, PATCH, FS], tool_choice=choice).body
    assert [tool["function"]["name"] for tool in body["tools"]] == names
    assert body["tool_choice"] == chat_choice


def test_calls_of_every_kind_go_back_by_the_names_that_the_model_knows() -> None:
    request = parse(
        tools=[ADD, PATCH, FS],
        input=[
            call("read", namespace="mcp__fs"),
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": 'a "b"\n'},
            output("1"),
            output("2", "c2", "custom_tool_call_output"),
        ],
    )
    made, first, second = request.body["messages"]
    assert made["tool_calls"][0] == chat_call("mcp__fs__read")
    assert made["tool_calls"][1]["function"]["name"] == "apply_patch"
    assert json.loads(made["tool_calls"][1]["function"]["arguments"]) == {"input": 'a "b"\n'}
    assert (first["content"], second["tool_call_id"]) == ("1", "c2")


def test_arguments_of_the_history_that_are_no_object_are_made_one_and_named() -> None:
    request = parse(input=[USER, call(arguments='{"a": '), call(arguments=" ", call_id="c2"), output("no JSON")])
    made, empty = request.body["messages"][1]["tool_calls"]
    assert json.loads(made["function"]["arguments"]) == {"unparsed_arguments": '{"a": '}
    assert empty["function"]["arguments"] == "{}"
    assert request.side["malformed_calls"] == ["c1"]


def test_a_wanted_format_and_the_effort() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    body = parse(text={"format": schema}, reasoning={"effort": "low", "summary": "auto"}, stream=True).body
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert (body["reasoning_effort"], body["stream"]) == ("low", True)
    assert "response_format" not in parse(text={"format": {"type": "text"}}).body
    assert parse(text={"format": {"type": "json_object"}}).body["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"conversation": "conv_1"}, "send the full input, or `previous_response_id`"),
        ({"prompt": {"id": "p"}}, "send their text as `instructions` or `input`"),
        ({"background": True}, "leave `background` out"),
        ({"input": None}, "`input` must hold at least one message"),
        ({"input": 5}, "`input` must be a list"),
        ({"input": ["x"]}, "`input` must hold objects"),
        ({"input": [{"type": "local_shell_call"}]}, "type local_shell_call, which this model cannot be shown: leave"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "send text or images"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "send it as `image_url`"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role must be one of user, assistant"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id must be a text"),
        ({"instructions": ["x"]}, "`instructions` must be a text"),
        ({"tools": [{"type": "local_shell"}]}, "offer a function or a custom tool instead"),
        ({"tools": [{"type": "function"}]}, "A function tool must have a name"),
        ({"tools": [{"type": "namespace"}]}, "A namespace must have a name"),
        ({"tool_choice": {"type": "web_search"}}, "names a tool that the model is not offered"),
        ({"tool_choice": "some"}, "must be auto, none, required or a tool"),
        ({"text": "x"}, "`text` must be an object"),
        ({"stream": "yes"}, "`stream` must be true or false"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_a_sentence(body: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**body)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)
KINDS = st.sampled_from(
    ["message", "reasoning", "function_call", "custom_tool_call", "function_call_output", "additional_tools", "other"]
)
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "input_image", "refusal"]) | JUNK},
    optional={"text": JUNK, "image_url": JUNK, "detail": JUNK, "refusal": JUNK},
)
GIVEN_TOOLS = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace", "web_search"]) | JUNK},
    optional={name: JUNK for name in ("description", "parameters", "format", "strict")}
    | {"name": st.text("ab", max_size=2) | JUNK, "tools": st.lists(JUNK, max_size=2)},
)
ITEMS = st.fixed_dictionaries(
    {"type": KINDS | JUNK},
    optional={
        **{name: JUNK for name in ("arguments", "input", "output", "encrypted_content", "summary", "namespace")},
        **{name: st.text(max_size=2) | JUNK for name in ("call_id", "name")},
        "role": st.sampled_from(["user", "assistant"]) | JUNK,
        "content": st.lists(PARTS, max_size=3) | JUNK,
        "tools": st.lists(GIVEN_TOOLS, max_size=2) | JUNK,
    },
)
BODIES = st.fixed_dictionaries(
    {"input": st.lists(ITEMS, max_size=4) | JUNK},
    optional={
        "tools": st.lists(GIVEN_TOOLS, max_size=3) | JUNK,
        "tool_choice": GIVEN_TOOLS | JUNK,
        **{name: JUNK for name in ("instructions", "text", "reasoning", "stream", "model", "metadata", "store")},
    },
)


@settings(max_examples=300)
@given(BODIES)
@example({"input": [{"type": [], "role": "user"}]})
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    try:
        request = ResponsesDialect().parse(body)
    except CallRefused:
        return
    assert request.body["messages"]
    json.dumps([request.body, dict(request.side)])
