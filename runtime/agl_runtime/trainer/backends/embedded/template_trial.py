"""Tries a policy's chat template: whether each turn's prompt begins with that of the turn before, in token ids.

Where it does not, every such turn begins a training sample of its own, whatever the harness.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from agl_runtime.trainer.backends.embedded.codec import Codec

Json = dict[str, Any]
_THOUGHT = "Twice two."
_PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
_CALCULATOR: Json = {"name": "calculator", "description": "Calculates.", "parameters": _PARAMETERS}
_TOOL: Json = {"type": "function", "function": _CALCULATOR}
_CALL: Json = {"id": "call00001", "type": "function"}
_CALL |= {"function": {"name": "calculator", "arguments": '{"expression": "2*2"}'}}
_ASKED: list[Json] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2*2?"}]
_CALLED: Json = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT: Json = {"role": "tool", "tool_call_id": "call00001", "name": "calculator", "content": "4"}
_ANSWERED: Json = {"role": "assistant", "content": "It is 4."}
_GOES_ON: Json = {"role": "user", "content": "And 3*3?"}


def faults(folder: Path) -> list[str]:
    """What the template in a Hugging Face folder does that splits samples, as clauses; empty where it does nothing.
    Raises what transformers and the template raise."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    codec, source = Codec(tokenizer, ()), str(tokenizer.chat_template)
    thinks, tools = "<think>" in source or "reasoning_content" in source, [_TOOL] if "tools" in source else []
    thought = {"reasoning_content": _THOUGHT} if thinks else {}
    talk = [*_ASKED, {**_CALLED, **thought}, _RESULT, {**_ANSWERED, **thought}, _GOES_ON]
    first, second, third = (codec.render(talk[:length], tools, {}) for length in (2, 4, 6))
    found = [] if tools else ["has no place for tools, so that those which an agent offers are not shown"]
    if second[: len(first)] != first:
        found.append("writes what stands before an answer anew once the answer is there")
    elif thinks and _THOUGHT not in codec.decode(second[len(first) :]):
        found.append("drops the reasoning of an answer that called a tool")
    if third[: len(second)] != second:
        found.append("writes earlier turns anew when the user speaks again")
    return found
