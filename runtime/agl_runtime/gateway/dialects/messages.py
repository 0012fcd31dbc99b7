"""Anthropic's messages API, for harnesses such as Claude Code: read as a chat body, answered as messages.

The answer's id is made when the request is read, so that a stream, its record and a replay of it name the same message.
"""

from __future__ import annotations

import uuid

from agl_runtime.gateway.dialects.base import SelfContained
from agl_runtime.gateway.dialects.messages_errors import error_body
from agl_runtime.gateway.dialects.messages_request import continued, read_body
from agl_runtime.gateway.dialects.messages_stream import MessageStream, event, message_of, replayed
from agl_runtime.gateway.dialects.openai import require
from agl_runtime.gateway.dialects.schema import body_of, talk_of
from agl_runtime.gateway.internal import Answer, CallRefused, Json, ModelRequest

PATH = "anthropic/v1/messages"
STANDS_FOR = {
    "continue_final_message": "a last message of the assistant, which this model server cannot go on with",
    "response_format": "`output_config.format`",
}


class MessagesDialect(SelfContained):
    name = "messages"
    path = PATH
    stands_for = STANDS_FOR
    keep_alive = event({"type": "ping"})
    schema = body_of(messages=talk_of("user", "assistant", "system"), max_tokens={"type": "integer", "minimum": 1})

    def parse(self, body: Json) -> ModelRequest:
        model, stream = body.get("model"), body.get("stream")
        require(model is None or isinstance(model, str), "`model` must be a string.")
        require(stream is None or isinstance(stream, bool), "`stream` must be true or false.")
        chat, left_out = read_body(body)
        message_id = f"msg_{uuid.uuid4().hex}"
        return ModelRequest(
            dialect=self.name,
            operation="chat/completions",
            original=body,
            body=chat,
            model=model or "",
            stream=bool(stream),
            answer_id=message_id,
            continues=continued(body["messages"]),
            side={"message_id": message_id, "left_out": left_out},
        )

    def render(self, request: ModelRequest, answer: Answer) -> Json:
        return message_of(request, answer)

    def stream(self, request: ModelRequest) -> MessageStream:
        return MessageStream(request)

    def replay(self, request: ModelRequest, response: Json) -> bytes:
        return b"".join(map(event, replayed(response)))

    def error(self, refused: CallRefused) -> Json:
        return error_body(refused)

    def conversation(self, request: Json, response: Json) -> Json:
        answer = [{"role": "assistant", "content": response["content"]}] if "content" in response else []
        return read_body({**request, "messages": [*request["messages"], *answer]})[0]
