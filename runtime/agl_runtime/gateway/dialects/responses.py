"""OpenAI's Responses API, over the model server's chat completions.

What a harness only names of earlier calls (`previous_response_id`, `item_reference`) is put in from the record of its
attempt before the request is read; the call's own record then holds the whole input. `side` holds the response's id and
time, the way back from shown tools, and what of the request could not be shown to the model.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from agl_runtime.gateway.dialects.base import Recorded
from agl_runtime.gateway.dialects.openai import KEEP_ALIVE, common, error_body
from agl_runtime.gateway.dialects.responses_answer import head, whole
from agl_runtime.gateway.dialects.responses_history import completed, continued, items_of, named
from agl_runtime.gateway.dialects.responses_request import read
from agl_runtime.gateway.dialects.responses_stream import ResponsesStream
from agl_runtime.gateway.dialects.schema import OBJECTS, body_of
from agl_runtime.gateway.internal import Answer, CallRefused, Json, ModelRequest

STANDS_FOR = {"response_format": "`text.format`", "reasoning_effort": "`reasoning.effort`"}


class ResponsesDialect:
    name = "responses"
    path = "openai/v1/responses"
    stands_for = STANDS_FOR
    keep_alive = KEEP_ALIVE
    schema = body_of(input={"anyOf": [{"type": "string"}, OBJECTS]})

    def named(self, body: Json) -> set[str]:
        return named(body)

    def completed(self, body: Json, recorded: Mapping[str, Recorded]) -> Json:
        return completed(body, recorded)

    def parse(self, body: Json) -> ModelRequest:
        chat, notes = read(body)
        response_id, continues = f"resp_{secrets.token_hex(16)}", continued(items_of(body))
        side = {"response_id": response_id, "created_at": int(time.time()), **notes}
        read_alike = {**common(body), "body": chat, "answer_id": response_id, "continues": continues}
        return ModelRequest(dialect=self.name, operation="chat/completions", side=side, **read_alike)

    def render(self, request: ModelRequest, answer: Answer) -> Json:
        return whole(request, answer)

    def stream(self, request: ModelRequest) -> ResponsesStream:
        return ResponsesStream(request, head(request), whole)

    def replay(self, request: ModelRequest, response: Json) -> bytes:
        begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        return ResponsesStream(request, begun, whole).finish(response)

    def error(self, refused: CallRefused) -> Json:
        return error_body(refused)

    def conversation(self, request: Json, response: Json) -> Json:
        return read({**request, "input": [*items_of(request), *response.get("output", [])]})[0]
