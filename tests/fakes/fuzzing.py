"""Requests at random, near enough to good ones to get far: bodies of every dialect, and what the OpenAPI document says
may be sent. Shared by the tests and by `benchmarks/bench_fuzz.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import schemathesis
from hypothesis import strategies as st

from agl_runtime.calls import RolloutCalls
from agl_runtime.gateway.app import create_app
from fakes.running_gateway import ADMIN_KEY, config

WITHOUT_END = "/api/changes"
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def near(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What is meant there, or now and then anything at all."""
    return st.integers(0, 39).flatmap(lambda dice: good if dice else json_values)


def record(needed: dict[str, Any], **optional: Any) -> st.SearchStrategy[Any]:
    fields = {name: near(value) for name, value in needed.items()}
    return st.fixed_dictionaries(fields, optional={name: near(value) for name, value in optional.items()})


def just(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


texts = st.text(max_size=12)
names = just("f", "g", "apply_patch", "", "a b")
call_ids = just("c1", "c2", "")
arguments = just("{}", '{"a": 1}', '{"input": "x"}', '{"a": ', "", "[]")
schemas = just({}, {"type": "object"}, {"type": "object", "properties": {"a": {"type": "integer"}}})
many = lambda items: st.lists(near(items), max_size=3)  # noqa: E731
images = just("data:image/png;base64,iVBORw0KGgo=", "http://127.0.0.1:9/x.png")

_function = record({"name": names, "arguments": arguments})
_chat_part = record({"type": just("text", "image_url")}, text=texts, image_url=record({"url": images}))
_chat_message = record(
    {"role": just("system", "developer", "user", "assistant", "tool"), "content": texts | many(_chat_part)},
    tool_calls=many(record({"id": call_ids, "type": just("function"), "function": _function})),
    tool_call_id=call_ids,
    reasoning_content=texts,
)
_chat_tool = record({"type": just("function"), "function": record({"name": names}, parameters=schemas)})
_options: dict[str, Any] = {
    "stream": st.booleans(),
    "temperature": just(0, 0.5, 1),
    "top_p": just(0.5, 1),
    "n": just(1, 2),
    "metadata": json_values,
    "stop": just("x", ["x"]),
    "logprobs": st.booleans(),
    "return_token_ids": st.booleans(),
    "stream_options": record({}, include_usage=st.booleans()),
}

_input_part = record({"type": just("input_text", "output_text", "input_image", "x")}, text=texts, image_url=images)
_input_item = record(
    {"role": just("user", "assistant", "developer", "system"), "content": texts | many(_input_part)}
) | record(
    {"type": just("function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output", "reasoning")},
    call_id=call_ids,
    name=names,
    arguments=arguments,
    input=texts,
    output=texts | many(_input_part),
    encrypted_content=texts,
    summary=many(record({"type": just("summary_text"), "text": texts})),
)
_responses_tool = record(
    {"type": just("function", "custom", "namespace", "web_search", "local_shell"), "name": names},
    parameters=schemas,
    tools=many(record({"type": just("function"), "name": names})),
)

_block = record(
    {"type": just("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking", "document")},
    text=texts,
    source=record({"type": just("base64", "url", "text")}, media_type=just("image/png"), data=texts, url=images),
    id=call_ids,
    tool_use_id=call_ids,
    name=names,
    input=just({}, {"a": 1}),
    content=texts,
    thinking=texts,
    signature=just("agl.msg_1", "x"),
    is_error=st.booleans(),
)
_turn = record({"role": just("user", "assistant"), "content": texts | many(_block)})

BODIES: dict[str, st.SearchStrategy[Any]] = {
    "openai/v1/chat/completions": record(
        {"messages": st.lists(near(_chat_message), min_size=1, max_size=4)},
        model=texts,
        tools=many(_chat_tool),
        tool_choice=just("auto", "none", "required"),
        **_options,
    ),
    "openai/v1/completions": record({"prompt": texts | st.lists(st.integers(0, 99), max_size=4)}, **_options),
    "openai/v1/responses": record(
        {"input": texts | st.lists(near(_input_item), min_size=1, max_size=4)},
        model=texts,
        instructions=texts,
        tools=many(_responses_tool),
        tool_choice=just("auto", "none", "required", {"type": "function", "name": "f"}),
        reasoning=record({}, effort=just("low", "high")),
        previous_response_id=just("resp_1"),
        **_options,
    ),
    "anthropic/v1/messages": record(
        {"messages": st.lists(near(_turn), min_size=1, max_size=4), "max_tokens": just(9)},
        model=texts,
        system=texts | many(_block),
        tools=many(record({"name": names, "input_schema": schemas}, type=just("custom", "bash_20250124"))),
        tool_choice=record({"type": just("auto", "any", "none", "tool")}, name=names),
        **_options,
    ),
}


def operations() -> dict[str, Any]:
    """What the document tells of, by method and path; the stream that has no end is left out."""
    document = create_app(config(), None, ADMIN_KEY).openapi()  # type: ignore[arg-type]
    schema = schemathesis.openapi.from_dict(document).exclude(path=WITHOUT_END)
    found = [result.ok() for result in schema.get_all_operations()]
    return {operation.label: operation for operation in found}


def at_home(case: Any, endpoint: str, **names: str) -> None:
    """Make a case of the document one that waits for nothing, calls nothing beyond `endpoint`, and is mostly about the
    rollout that `names` name."""
    if isinstance(case.path_parameters, dict) and len(str(case.path_parameters)) % 4:
        case.path_parameters |= {name: value for name, value in names.items() if name in case.path_parameters}
    for fields in (case.query, case.body):
        for name in ("wait", "drained_wait"):
            if isinstance(fields, dict) and name in fields:
                fields[name] = 0
    for model in case.body if isinstance(case.body, list) else ():
        if isinstance(model, dict) and "endpoint" in model:
            model["endpoint"] = endpoint


def faults_of(recorded: RolloutCalls) -> list[str]:
    """What is wrong with a record in which every call has come to an end."""
    faults = [f"{call_id} was never recorded" for call_id in recorded.incomplete]
    for call in recorded.calls:
        info, sizes = call.info, (call.sampled_ids.size, call.logprobs.size, sum(s.end - s.start for s in call.spans))
        is_sound = call.prompt_ids.size and sizes[0] and len(set(sizes)) == 1 and np.isfinite(call.logprobs).all()
        if info.trainable and not (is_sound and info.http_status == 200 and info.reason is None):
            faults.append(f"{info.call_id} is trainable with {call.prompt_ids.size} and {sizes}: {info}")
        if not info.trainable and not info.reason:
            faults.append(f"{info.call_id} is not trainable for no reason")
    return faults
