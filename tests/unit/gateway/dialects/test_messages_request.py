"""What becomes of a messages body: the chat body that the model server gets, or a refusal with a sentence."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_runtime.gateway.dialects.messages import MessagesDialect
from agl_runtime.gateway.fidelity import changed_params
from agl_runtime.gateway.internal import CallRefused, ModelRequest

DIALECT = MessagesDialect()
USER = {"role": "user", "content": "hi"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def parse(*messages: Any, **body: Any) -> ModelRequest:
    return DIALECT.parse({"model": "m", "max_tokens": 5, "messages": list(messages) or [USER], **body})


def shown(*messages: Any, **body: Any) -> list[Any]:
    return list(parse(*messages, **body).body["messages"])


@pytest.mark.parametrize("system", ["be brief", [text("be brief", cache_control={"type": "ephemeral"})]])
def test_a_system_prompt_comes_first_as_text_or_as_one_block(system: Any) -> None:
    assert shown(system=system) == [{"role": "system", "content": "be brief"}, USER]


def test_several_system_blocks_stay_apart_and_the_billing_header_is_left_out_by_name() -> None:
    blocks = [text("x-anthropic-billing-header: cch=1;"), text("a"), text("b")]
    request = parse(system=blocks)
    assert request.body["messages"][0] == {"role": "system", "content": [text("a"), text("b")]}
    assert request.side["left_out"] == ["billing header"]


def test_a_system_message_within_the_history_stays_in_its_place() -> None:
    said = {"role": "assistant", "content": "yes"}
    history = shown(USER, said, {"role": "system", "content": [text("now")]}, USER)
    assert history == [USER, said, {"role": "system", "content": "now"}, USER]


def test_moving_cache_marks_change_nothing() -> None:
    plain = parse({"role": "user", "content": "hi"})
    marked = parse({"role": "user", "content": [text("hi", cache_control={"type": "ephemeral", "ttl": "1h"})]})
    assert marked.body == plain.body


def test_images_become_parts_by_data_and_by_url() -> None:
    by_url = {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}
    content = shown({"role": "user", "content": [text("see"), PNG, by_url]})[0]["content"]
    assert content == [text("see"), PNG_PART, {"type": "image_url", "image_url": {"url": "https://x/y.png"}}]


def test_documents_of_text_are_shown_with_their_titles() -> None:
    plain = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "body"}}
    mixed = {"type": "document", "source": {"type": "content", "content": [text("page"), PNG]}}
    found = {"type": "search_result", "title": "R", "source": "u", "content": [text("hit")]}
    content = shown({"role": "user", "content": [plain, mixed, found]})[0]["content"]
    assert content == [text("T"), text("body"), text("page"), PNG_PART, text("R"), text("u"), text("hit")]


def test_a_pdf_is_refused_with_what_to_send_instead() -> None:
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}}
    with pytest.raises(CallRefused) as caught:
        parse({"role": "user", "content": [pdf]})
    assert str(caught.value) == (
        "messages[0] holds a document that is not text (a PDF or an uploaded file), which the model cannot read. "
        "Send its text, or its pages as images."
    )


def test_tool_results_and_the_text_beside_them_keep_their_order() -> None:
    content = [
        text("before"),
        {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [text("two"), PNG]},
        text("after"),
    ]
    assert shown({"role": "user", "content": content}) == [
        {"role": "user", "content": "before"},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": [text("two"), PNG_PART]},
        {"role": "user", "content": "after"},
    ]


@pytest.mark.parametrize(
    ("content", "seen"), [("no file", "Error: no file"), (None, "Error"), ([PNG], [text("Error"), PNG_PART])]
)
def test_a_failed_tool_is_seen_to_have_failed(content: Any, seen: Any) -> None:
    block = {"type": "tool_result", "tool_use_id": "c1", "content": content, "is_error": True}
    assert shown({"role": "user", "content": [block]}) == [{"role": "tool", "tool_call_id": "c1", "content": seen}]


def test_an_assistants_thinking_text_and_calls_become_one_message() -> None:
    thought = "first\n\n  <b>é\u2028"
    content = [
        {"type": "thinking", "thinking": thought, "signature": "agl.msg_1"},
        {"type": "redacted_thinking", "data": "x"},
        text("I add"),
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": "é", "c": False}},
        {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
    ]
    request = parse(USER, {"role": "assistant", "content": content}, USER)
    assert request.body["messages"][1] == {
        "role": "assistant",
        "content": "I add",
        "reasoning_content": thought,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 1, "b": "é", "c": false}'},
            },
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }
    assert request.side["left_out"] == ["redacted_thinking"]


def test_what_the_vendors_own_tools_did_is_left_out_by_name() -> None:
    done = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "mcp_tool_use", "id": "m1", "name": "x", "input": {}},
        text("found"),
    ]
    request = parse(USER, {"role": "assistant", "content": done}, USER)
    assert request.body["messages"][1] == {"role": "assistant", "content": "found"}
    assert request.side["left_out"] == ["server_tool_use", "web_search_tool_result", "mcp_tool_use"]


def test_calls_alone_have_no_content_as_the_model_server_gave_none() -> None:
    content = [{"type": "tool_use", "id": "c1", "name": "add", "input": {}}]
    assert shown(USER, {"role": "assistant", "content": content}, USER)[1]["content"] is None


def test_a_message_that_the_model_is_to_go_on_with_is_marked_as_one() -> None:
    body = parse(USER, {"role": "assistant", "content": "The answer is ("}).body
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in parse().body


def test_custom_tools_become_functions() -> None:
    given = {**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}, "defer_loading": True, "strict": True}
    assert parse(tools=[TOOL]).body["tools"] == [FUNCTION]
    assert parse(tools=[given]).body["tools"] == [FUNCTION]


@pytest.mark.parametrize(
    ("kind", "name", "some"),
    [
        ("bash_20250124", "bash", {"command", "restart"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command", "path", "old_str", "insert_text"}),
        ("memory_20250818", "memory", {"command", "path", "old_path", "new_path"}),
        ("computer_20250124", "computer", {"action", "coordinate", "text"}),
    ],
)
def test_tools_that_the_client_runs_get_the_schema_that_it_leaves_out(kind: str, name: str, some: set[str]) -> None:
    (tool,) = parse(tools=[{"type": kind, "name": name}]).body["tools"]
    assert tool["function"]["name"] == name
    assert some <= tool["function"]["parameters"]["properties"].keys()


def test_tools_that_nobody_here_can_run_are_left_out_by_name() -> None:
    request = parse(tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, TOOL])
    assert request.body["tools"] == [FUNCTION]
    assert request.side["left_out"] == ["tool web_search_20250305"]
    assert "tools" not in parse(tools=[{"type": "code_execution_20250825", "name": "code_execution"}]).body


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "add"}, {"tool_choice": {"type": "function", "function": {"name": "add"}}}),
    ],
)
def test_the_choice_of_a_tool(choice: Any, expected: dict[str, Any]) -> None:
    body = parse(tools=[TOOL], tool_choice=choice).body
    assert {key: body[key] for key in ("tool_choice", "parallel_tool_calls") if key in body} == expected


def test_sampling_parameters_and_what_changes_the_distribution() -> None:
    body = parse(stop_sequences=["END"], temperature=0.5, top_p=0.9, top_k=5, stream=True).body
    kept = {"max_tokens": 5, "stop": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stream": True}
    assert {key: body[key] for key in kept} == kept
    assert changed_params(body) == ("top_p", "top_k")


def test_a_wanted_json_form_is_passed_on() -> None:
    body = parse(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "low"}).body
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}},
    }


def test_unknown_fields_are_tolerated_and_named() -> None:
    request = parse(
        thinking={"type": "adaptive"}, metadata={"user_id": "u"}, context_management={"edits": []}, new_field=1
    )
    assert request.side["left_out"] == ["thinking", "context_management", "new_field"]
    assert request.original["new_field"] == 1


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"messages": []}, "`messages` must be a list of at least one message object."),
        ({"messages": "hi"}, "`messages` must be a list of at least one message object."),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be user, assistant or system."),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0]: content must be a text or a list of blocks."),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0]: `text` must be a string."),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0] holds a block of the type hologram, which cannot be shown here.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0] holds an image that is neither base64 nor a URL.",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": "x"}]}]},
            "messages[0] holds a tool_use without an object as `input`.",
        ),
        ({"tools": 5}, "`tools` must be a list of objects."),
        ({"tools": [{"name": "x"}]}, "tools[0]: `input_schema` must be an object."),
        ({"tools": [{"input_schema": {}}]}, "tools[0]: `name` must be a string."),
        ({"tool_choice": "any"}, "`tool_choice.type` must be auto, any, tool or none."),
        ({"tool_choice": {"type": "any"}}, "`tool_choice` asks for a tool call, and there are no tools to call."),
        (
            {"tool_choice": {"type": "tool", "name": "web_search"}, "tools": [{"type": "web_search_20250305"}]},
            "`tool_choice` names web_search, which nobody here can run.",
        ),
        ({"stream": 1}, "`stream` must be true or false."),
        ({"model": 1}, "`model` must be a string."),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_sentence(body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CallRefused) as caught:
        DIALECT.parse({"messages": [USER], **body})
    assert (str(caught.value), caught.value.http_status) == (sentence, 400)


odd = st.none() | st.booleans() | st.integers(-2, 2) | st.text(max_size=3)
NAMES = ["type", "text", "thinking", "input", "id", "name", "content", "source", "data", "url", "media_type", "title",
         "tool_use_id", "is_error", "role", "format", "input_schema"]  # fmt: skip
KINDS = ["text", "image", "document", "tool_use", "tool_result", "thinking", "search_result", "base64", "url",
         "content", "tool_reference", "server_tool_use", "json_schema", "custom", "tool", "any"]  # fmt: skip
values = st.recursive(
    odd | st.sampled_from(KINDS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
        | st.fixed_dictionaries({"type": st.sampled_from(KINDS)}, optional={name: inner for name in NAMES[1:]})
    ),
    max_leaves=5,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": values})
    | st.dictionaries(st.sampled_from(NAMES), values, max_size=3),
    min_size=1,
    max_size=3,
)
FIELDS = ["model", "system", "tools", "tool_choice", "stream", "max_tokens", "output_config", "stop_sequences", "new"]
bodies = st.fixed_dictionaries({"messages": messages}, optional={name: values for name in FIELDS})


@given(bodies)
@settings(max_examples=100, deadline=None)
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    try:
        request = DIALECT.parse(body)
    except CallRefused:
        return
    assert orjson.dumps([request.body, dict(request.side)])
    assert all(message["role"] in ("system", "user", "assistant", "tool") for message in request.body["messages"])
