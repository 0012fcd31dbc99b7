"""OpenAI's plain completions: a prompt of text or token ids, continued."""

from __future__ import annotations

from agl_runtime.gateway.dialects.openai import OpenAIDialect, common, first_choice, require
from agl_runtime.gateway.dialects.schema import body_of
from agl_runtime.gateway.internal import Json, ModelRequest, Operation


class CompletionsDialect(OpenAIDialect):
    name = "completions"
    operation: Operation = "completions"
    chunk = "text_completion"
    schema = body_of(prompt={"type": ["string", "array"], "minLength": 1, "minItems": 1})

    def parse(self, body: Json) -> ModelRequest:
        prompt = body.get("prompt")
        require(isinstance(prompt, str | list) and bool(prompt), "`prompt` must be a text or a list.")
        return ModelRequest(dialect=self.name, operation=self.operation, **common(body))

    def conversation(self, request: Json, response: Json) -> Json:
        text = first_choice(response).get("text")
        answer = [] if text is None else [{"role": "assistant", "content": text}]
        return {"messages": [{"role": "prompt", "content": request["prompt"]}, *answer]}
