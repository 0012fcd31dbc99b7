"""OpenAI's chat completions: the form that the model server speaks, so bodies pass through."""

from __future__ import annotations

from agl_runtime.gateway.dialects.openai import OpenAIDialect, common, first_choice, is_objects, require
from agl_runtime.gateway.dialects.schema import body_of, talk_of
from agl_runtime.gateway.internal import Json, ModelRequest, Operation


class ChatDialect(OpenAIDialect):
    name = "chat"
    operation: Operation = "chat/completions"
    chunk = "chat.completion.chunk"
    schema = body_of(messages=talk_of("system", "developer", "user", "assistant", "tool"))

    def parse(self, body: Json) -> ModelRequest:
        messages, tools = body.get("messages"), body.get("tools")
        require(bool(messages) and is_objects(messages), "`messages` must be a list of at least one message object.")
        require(tools is None or is_objects(tools), "`tools` must be a list of objects.")
        return ModelRequest(dialect=self.name, operation=self.operation, **common(body))

    def conversation(self, request: Json, response: Json) -> Json:
        message = first_choice(response).get("message") or {}
        answer = {key: value for key, value in message.items() if value is not None or key == "content"}
        return {**request, "messages": [*request["messages"], *([answer] if answer else [])]}

    def replayed(self, choice: Json) -> Json:
        rest = {key: value for key, value in choice.items() if key != "message"}
        delta = dict(choice.get("message") or {})
        if is_objects(delta.get("tool_calls")):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
        return {**rest, "delta": delta}
