"""A request of the Responses API as the model server's own chat completions take it. Pure.

Items that one answer consists of (reasoning, message, calls) become one assistant message; every other item keeps its
place. Tools that only their vendor could run, and what no chat API knows, are left out and named in
`side["left_out"]`. What cannot be expressed is refused with a sentence.
"""

from __future__ import annotations

from typing import Any

from agl_runtime.gateway.dialects.openai import require
from agl_runtime.gateway.dialects.reasoning import unseal
from agl_runtime.gateway.dialects.responses_history import items_of, objects
from agl_runtime.gateway.dialects.tools import FREEFORM_SCHEMA, UNPARSED, Tool, ToolNames, arguments_of, is_object
from agl_runtime.gateway.internal import CallRefused, Json

_REFUSED = {
    "conversation": "Conversations are not kept here: send the full input, or `previous_response_id`.",
    "prompt": "Stored prompts are not known here: send their text as `instructions` or `input`.",
    "background": "Answers are not made in the background: leave `background` out.",
}
# Run by the harness, but their form is known only to models that were trained on it.
_BUILT_IN = ("local_shell", "shell", "apply_patch", "computer", "computer_use_preview")
_PASSED: tuple[str, ...] = ("temperature", "top_p", "parallel_tool_calls", "stream", "seed", "stop", "presence_penalty")
_PASSED += ("frequency_penalty", "top_k", "min_p", "repetition_penalty", "chat_template_kwargs")
_UNHEARD = ("top_logprobs", "max_tool_calls", "truncation")
_ROLES = ("user", "assistant", "system", "developer")
_DETAILS = ("low", "high")
_TEXTS = frozenset({"input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"})


def read(body: Json) -> tuple[Json, Json]:
    """The chat body, and what of the request goes on record as side-state. Raises CallRefused."""
    for name, sentence in _REFUSED.items():
        require(not body.get(name), sentence)
    items = items_of(body)
    offering = [body, *(item for item in items if item.get("type") == "additional_tools")]
    offer = _Offer([tool for holder in offering for tool in objects("tools", holder.get("tools"))])
    names = ToolNames(offer.tools)
    talk = _Conversation(names)
    if instructions := body.get("instructions"):
        require(isinstance(instructions, str), "`instructions` must be a text.")
        talk.messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items):
        talk.add(f"input[{number}]", item)
    talk.close()
    require(bool(talk.messages), "`input` must hold at least one message.")
    chat = {"messages": talk.messages, **_parameters(body), **_offered(body, offer, names)}
    unheard = [name for name in _UNHEARD if body.get(name) not in (None, 0, "disabled")]
    notes = {
        "left_out": offer.left_out + unheard,
        "unreadable_reasoning": talk.unreadable,
        "malformed_calls": talk.malformed,
    }
    return chat, {"tools": names.way_back(), **{name: value for name, value in notes.items() if value}}


def _parameters(body: Json) -> Json:
    chat = {name: body[name] for name in _PASSED if body.get(name) is not None}
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    for name in ("reasoning", "text"):
        require(isinstance(body.get(name), dict | None), f"`{name}` must be an object.")
    if effort := (body.get("reasoning") or {}).get("effort"):
        chat["reasoning_effort"] = effort
    wanted = (body.get("text") or {}).get("format")
    require(isinstance(wanted, dict | None), "`text.format` must be an object.")
    if wanted and wanted.get("type") == "json_schema":
        schema = {key: value for key, value in wanted.items() if key != "type"}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted and wanted.get("type") not in (None, "text"):
        chat["response_format"] = wanted
    return chat


class _Offer:
    """The tools of a request: what the model is told of those that it can be shown, and what is left out."""

    def __init__(self, given: list[Json]) -> None:
        self.tools: dict[Tool, Json] = {}
        self.left_out: list[str] = []
        for tool in given:
            self._add(tool, "", "")

    def _add(self, tool: Json, namespace: str, about: str) -> None:
        kind, name = tool.get("type"), tool.get("name")
        refused = f"A {kind} tool has a form that this model does not know: offer a function or a custom tool instead."
        require(kind not in _BUILT_IN, refused)
        if kind == "namespace" and not namespace:
            require(isinstance(name, str) and bool(name), "A namespace must have a name.")
            for inner in objects("tools", tool.get("tools")):
                self._add(inner, str(name), _text(tool.get("description")))
        elif kind in ("function", "custom"):
            require(isinstance(name, str) and bool(name), f"A {kind} tool must have a name.")
            self.tools[Tool(kind, namespace, str(name))] = _shown(tool, about)
        else:
            label = tool.get("server_label") or name
            self.left_out.append(f"{kind} {label}" if label else str(kind))


def _shown(tool: Json, about: str) -> Json:
    """What the model is told of a tool, beside its name; `about` is said of its namespace."""
    form, texts = tool.get("format"), [about, _text(tool.get("description"))]
    if isinstance(form, dict) and form.get("type") == "grammar":
        texts.append(f"The input must follow this {form.get('syntax')} grammar:\n{form.get('definition')}")
    given = {"parameters": FREEFORM_SCHEMA} if tool["type"] == "custom" else tool
    kept = {name: given[name] for name in ("parameters", "strict") if given.get(name) is not None}
    described = "\n".join(filter(None, texts))
    return {"description": described, **kept} if described else kept


def _offered(body: Json, offer: _Offer, names: ToolNames) -> Json:
    """The tools and the choice among them, as chat has it."""
    choice, tools = body.get("tool_choice"), list(offer.tools)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = objects("tool_choice.tools", choice.get("tools"))
        tools = [tool for tool in tools if any(_fits(tool, wanted) for wanted in allowed)]
        choice = choice.get("mode")
    elif isinstance(choice, dict):
        fitting = [tool for tool in tools if _fits(tool, choice)]
        require(bool(fitting), "`tool_choice` names a tool that the model is not offered.")
        choice = {"type": "function", "function": {"name": names.shown(fitting[0])}}
    is_known = isinstance(choice, dict) or choice in (None, "auto", "none", "required")
    require(is_known, "`tool_choice` must be auto, none, required or a tool.")
    if not tools:
        return {}
    functions = [{"name": names.shown(tool), **offer.tools[tool]} for tool in tools]
    shown = {"tools": [{"type": "function", "function": function} for function in functions]}
    return shown if choice is None else {**shown, "tool_choice": choice}


def _fits(tool: Tool, wanted: Json) -> bool:
    """A choice may name a whole namespace, or a tool with or without its namespace."""
    if wanted.get("type") == "namespace":
        return [tool.namespace] == [wanted.get("name")]
    named = [wanted.get("type"), wanted.get("namespace") or tool.namespace, wanted.get("name")]
    return list(tool) == named


class _Conversation:
    """Items become messages. `unreadable` are reasoning items whose text nobody here can read, and `malformed` calls
    whose arguments are no JSON object, which model servers refuse in a history."""

    def __init__(self, names: ToolNames) -> None:
        self.messages: list[Json] = []
        self.unreadable: list[str] = []
        self.malformed: list[str] = []
        self._names = names
        self._turn: Json | None = None

    def add(self, where: str, item: Json) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(where, item)
        elif kind == "reasoning":
            self._reasoning(where, item)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(where, item)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id = _string(where, item, "call_id")
            self._say({"role": "tool", "tool_call_id": call_id, "content": _content(where, item.get("output"))})
        elif kind != "additional_tools":
            raise _unshown(where, kind, "leave it out")

    def close(self) -> None:
        """The assistant's turn is over. Without calls it has a text, if an empty one."""
        if self._turn is not None and "tool_calls" not in self._turn:
            self._turn["content"] = self._turn["content"] or ""
        self._turn = None

    def _say(self, message: Json) -> None:
        self.close()
        self.messages.append(message)

    def _open(self) -> Json:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": None}
            self.messages.append(self._turn)
        return self._turn

    def _message(self, where: str, item: Json) -> None:
        role, content = item.get("role"), _content(where, item.get("content"))
        require(role in _ROLES, f"{where}.role must be one of {', '.join(_ROLES)}.")
        if role != "assistant":
            self._say({"role": role, "content": content})
            return
        if self._turn is not None and self._turn["content"] is not None:
            self.close()
        is_text = isinstance(content, list) and all(part["type"] == "text" for part in content)
        self._open()["content"] = _joined(content) if is_text else content

    def _reasoning(self, where: str, item: Json) -> None:
        _, text = unseal(item.get("encrypted_content")) or ("", "")
        text = text or _joined(item.get("content")) or _joined(item.get("summary"), "\n\n")
        if not text:
            self.unreadable.append(where)
            return
        if self._turn is not None and (self._turn["content"] is not None or "tool_calls" in self._turn):
            self.close()
        turn = self._open()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _call(self, where: str, item: Json) -> None:
        is_custom = item["type"] == "custom_tool_call"
        arguments = _string(where, item, "input" if is_custom else "arguments")
        call_id, name = _string(where, item, "call_id"), _string(where, item, "name")
        if is_custom:
            arguments = arguments_of("input", arguments)
        elif not is_object(arguments := arguments if arguments.strip() else "{}"):
            self.malformed.append(call_id)
            arguments = arguments_of(UNPARSED, arguments)
        tool = Tool("custom" if is_custom else "function", _text(item.get("namespace")), name)
        function = {"name": self._names.shown(tool), "arguments": arguments}
        self._open().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


def _string(where: str, item: Json, key: str) -> str:
    value = item.get(key)
    require(isinstance(value, str), f"{where}.{key} must be a text.")
    return str(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _joined(parts: Any, between: str = "") -> str:
    parts = parts if isinstance(parts, list) else []
    return between.join(_text(part.get("text")) for part in parts if isinstance(part, dict))


def _content(where: str, given: Any) -> str | list[Json]:
    """A single text as a string, anything else as chat's parts."""
    if given is None or isinstance(given, str):
        return given or ""
    require(isinstance(given, list), f"{where} must hold a text or a list of parts.")
    parts = [_part(f"{where}, part {number}", part) for number, part in enumerate(given)]
    if not parts or (len(parts) == 1 and parts[0]["type"] == "text"):
        return _joined(parts)
    return parts


def _part(where: str, part: Any) -> Json:
    kind = _text(part.get("type")) if isinstance(part, dict) else ""
    if kind in _TEXTS:
        return {"type": "text", "text": _string(where, part, "refusal" if kind == "refusal" else "text")}
    if kind == "input_image":
        image = {"url": part["image_url"]} if isinstance(part.get("image_url"), str) else None
        require(image is not None, f"{where} names an image by its id: send it as `image_url`.")
        detail = {"detail": part["detail"]} if part.get("detail") in _DETAILS else {}
        return {"type": "image_url", "image_url": {**(image or {}), **detail}}
    raise _unshown(where, kind, "send text or images")


def _unshown(where: str, kind: Any, instead: str) -> CallRefused:
    sentence = f"{where} is of the type {kind}, which this model cannot be shown: {instead}."
    return CallRefused(sentence, http_status=400)
