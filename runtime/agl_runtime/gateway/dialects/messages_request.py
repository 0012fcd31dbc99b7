"""A body of Anthropic's messages API as the model server's chat body. Pure.

Every message stays where it stands and every block in its order: a tool result becomes a `tool` message, what a user
says beside it a message before or after it. One text block is the same as its string, and `cache_control` is not looked
at, so that a history which a harness writes anew each turn stays the same. What cannot be shown to the model is refused
with a sentence, or, where the model loses nothing that it could use, left out by name.
"""

from __future__ import annotations

import json
from typing import Any

from agl_runtime.gateway.dialects.openai import is_objects, require
from agl_runtime.gateway.internal import CallRefused, Json

_RENAMED = {name: name for name in ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")}
_RENAMED["stop_sequences"] = "stop"
_READ = {*_RENAMED, "messages", "system", "tools", "tool_choice", "output_config"}
_LABELS = {"metadata", "service_tier", "cache_control", "betas"}
# Claude Code's first system block; it differs from call to call and is not meant for a model.
_BILLING = "x-anthropic-billing-header"
SIGNED = "agl."  # begins our signatures; the message's id follows
_CHOICES = {"any": "required", "none": "none"}
_FILE = dict.fromkeys(("command", "path", "file_text", "old_str", "new_str", "insert_text"), "string")
_FILE |= {"insert_line": "integer", "view_range": "array"}
_SCREEN = dict.fromkeys(("action", "text", "scroll_direction"), "string") | {"duration": "number"}
_SCREEN |= {"coordinate": "array", "start_coordinate": "array", "region": "array", "scroll_amount": "integer"}
_NOTES = "Keep notes in files. Commands: view, create, str_replace, insert, delete, rename."
# Tools whose schema the vendor's models know by heart and the client executes: description and parameters.
_CLIENT_TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "bash_20": ("Run a command in a shell that keeps its state.", {"command": "string", "restart": "boolean"}),
    "text_editor_20": ("View and edit files. Commands: view, create, str_replace, insert.", _FILE),
    "memory_20": (_NOTES, {**_FILE, "old_path": "string", "new_path": "string"}),
    "computer_20": ("Look at the screen, and use mouse and keyboard.", _SCREEN),
}


def read_body(body: Json) -> tuple[Json, list[str]]:
    """The chat body, and the names of what is left out of it. Raises CallRefused."""
    left_out = [name for name, value in body.items() if value is not None and name not in _READ | _LABELS]
    chat = {new: body[old] for old, new in _RENAMED.items() if body.get(old) not in (None, [])}
    chat["messages"] = _messages(body, left_out)
    if tools := _tools(body.get("tools"), left_out):
        chat["tools"] = tools
    chat |= _choice(body.get("tool_choice"), [tool["function"]["name"] for tool in tools])
    output = body.get("output_config")
    form = output.get("format") if isinstance(output, dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        schema = {"name": "output", "schema": form.get("schema")}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if chat["messages"][-1]["role"] == "assistant":  # a beginning that the model is to go on with
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat, left_out


def continued(messages: list[Json]) -> str | None:
    """The message that the assistant's last one is, where its thinking's signature names it."""
    said = next((message for message in reversed(messages) if message.get("role") == "assistant"), {})
    blocks = said["content"] if is_objects(said.get("content")) else []
    signatures = {str(block.get("signature")) for block in blocks if block.get("type") == "thinking"}
    signature = signatures.pop() if len(signatures) == 1 else ""
    return signature.removeprefix(SIGNED) if signature.startswith(SIGNED) else None


def _messages(body: Json, left_out: list[str]) -> list[Json]:
    given: Any = body.get("messages")
    out: list[Json] = []
    require(bool(given) and is_objects(given), "`messages` must be a list of at least one message object.")
    if system := _system(body.get("system"), left_out):
        out.append({"role": "system", "content": _content(system)})
    for index, message in enumerate(given):
        where, role = f"messages[{index}]", message.get("role")
        require(role in ("user", "assistant", "system"), f"{where}.role must be user, assistant or system.")
        if role == "assistant":
            out.append(_assistant(where, message.get("content"), left_out))
        elif role == "user":
            out += _user(where, message.get("content"), left_out)
        else:
            out.append({"role": "system", "content": _content(_parts(where, message.get("content"), left_out))})
    return out


def _system(system: Any, left_out: list[str]) -> list[Json]:
    parts = _parts("system", system, left_out)
    shown = [part for part in parts if not part.get("text", "").startswith(_BILLING)]
    if len(shown) < len(parts):
        left_out.append("billing header")
    return shown


def _user(where: str, content: Any, left_out: list[str]) -> list[Json]:
    out: list[Json] = []
    parts: list[Json] = []
    for block in _blocks(where, content):
        if block.get("type") != "tool_result":
            parts += _shown(where, block, left_out)
            continue
        if parts:
            out.append({"role": "user", "content": _content(parts)})
            parts = []
        out.append(_tool_result(where, block, left_out))
    return [*out, {"role": "user", "content": _content(parts)}] if parts or not out else out


def _tool_result(where: str, block: Json, left_out: list[str]) -> Json:
    parts = _parts(where, block.get("content"), left_out)
    if block.get("is_error") is True:
        first = parts.pop(0)["text"] if parts and parts[0]["type"] == "text" else ""
        parts.insert(0, _text_part(f"Error: {first}" if first else "Error"))
    return {"role": "tool", "tool_call_id": _string(where, block, "tool_use_id"), "content": _content(parts)}


def _assistant(where: str, content: Any, left_out: list[str]) -> Json:
    thinking: list[str] = []
    parts: list[Json] = []
    calls: list[Json] = []
    for block in _blocks(where, content):
        if block.get("type") == "thinking":
            thinking.append(_string(where, block, "thinking"))
        elif block.get("type") == "tool_use":
            calls.append(_call(where, block))
        else:
            parts += _shown(where, block, left_out)
    message: Json = {"role": "assistant", "content": _content(parts) if parts or not calls else None}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(where: str, block: Json) -> Json:
    given = block.get("input")
    if not isinstance(given, dict):
        raise CallRefused(f"{where} holds a tool_use without an object as `input`.", http_status=400)
    function = {"name": _string(where, block, "name"), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": _string(where, block, "id"), "type": "function", "function": function}


def _parts(where: str, content: Any, left_out: list[str]) -> list[Json]:
    return [part for block in _blocks(where, content) for part in _shown(where, block, left_out)]


def _blocks(where: str, content: Any) -> list[Json]:
    if isinstance(content, str):
        return [_text_part(content)]
    require(content is None or is_objects(content), f"{where}: content must be a text or a list of blocks.")
    return content or []


def _shown(where: str, block: Json, left_out: list[str]) -> list[Json]:
    """The chat parts of a block that is no tool call, no tool result and no thinking."""
    kind = str(block.get("type"))
    if kind == "text":
        return [_text_part(_string(where, block, "text"))]
    if kind == "image":
        return [{"type": "image_url", "image_url": {"url": _image_url(where, block.get("source"))}}]
    if kind == "document":
        return _titled(block, ("title", "context")) + _document(where, block.get("source"), left_out)
    if kind == "search_result":
        return _titled(block, ("title", "source")) + _parts(where, block.get("content"), left_out)
    if kind == "tool_reference":
        return [_text_part(_string(where, block, "tool_name"))]
    if kind in ("redacted_thinking", "server_tool_use", "mcp_tool_use") or kind.endswith("_tool_result"):
        left_out.append(kind)  # another model's secrets, and what tools of the vendor's servers said
        return []
    raise CallRefused(f"{where} holds a block of the type {kind}, which cannot be shown here.", http_status=400)


def _document(where: str, source: Any, left_out: list[str]) -> list[Json]:
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "text":
        return [_text_part(_string(where, source, "data"))]
    if source.get("type") == "content":
        return _parts(where, source.get("content"), left_out)
    what = f"{where} holds a document that is not text (a PDF or an uploaded file), which the model cannot read."
    raise CallRefused(what, "Send its text, or its pages as images.", http_status=400)


def _image_url(where: str, source: Any) -> str:
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "base64":
        return f"data:{_string(where, source, 'media_type')};base64,{_string(where, source, 'data')}"
    require(source.get("type") == "url", f"{where} holds an image that is neither base64 nor a URL.")
    return _string(where, source, "url")


def _titled(block: Json, keys: tuple[str, ...]) -> list[Json]:
    return [_text_part(block[key]) for key in keys if isinstance(block.get(key), str)]


def _content(parts: list[Json]) -> str | list[Json]:
    if not parts:
        return ""
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def _string(where: str, block: Json, key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise CallRefused(f"{where}: `{key}` must be a string.", http_status=400)
    return value


def _tools(tools: Any, left_out: list[str]) -> list[Json]:
    require(tools is None or is_objects(tools), "`tools` must be a list of objects.")
    functions = [_function(f"tools[{index}]", tool, left_out) for index, tool in enumerate(tools or [])]
    return [{"type": "function", "function": function} for function in functions if function]


def _function(where: str, tool: Json, left_out: list[str]) -> Json | None:
    """None for a tool that only the vendor's servers could run."""
    kind, schema = str(tool.get("type") or "custom"), tool.get("input_schema")
    about = {"description": tool["description"]} if isinstance(tool.get("description"), str) else {}
    known = next((found for prefix, found in _CLIENT_TOOLS.items() if kind.startswith(prefix)), None)
    if not isinstance(schema, dict) and known is not None:
        about = {"description": known[0]}
        schema = {"type": "object", "properties": {name: {"type": of} for name, of in known[1].items()}}
    if not isinstance(schema, dict):
        require(kind != "custom", f"{where}: `input_schema` must be an object.")
        left_out.append(f"tool {kind}")
        return None
    return {"name": _string(where, tool, "name"), **about, "parameters": schema}


def _choice(choice: Any, names: list[str]) -> Json:
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, dict) else None
    require(kind in ("auto", "any", "tool", "none"), "`tool_choice.type` must be auto, any, tool or none.")
    if kind == "tool":
        require(choice.get("name") in names, f"`tool_choice` names {choice.get('name')}, which nobody here can run.")
    require(bool(names) or kind != "any", "`tool_choice` asks for a tool call, and there are no tools to call.")
    out: Json = {"parallel_tool_calls": False} if names and choice.get("disable_parallel_tool_use") is True else {}
    if kind == "tool":
        out["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif names and kind in _CHOICES:
        out["tool_choice"] = _CHOICES[kind]
    return out
