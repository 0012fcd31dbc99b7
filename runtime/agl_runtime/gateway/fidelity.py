"""Whether a call may be trained on, or the named reason why not. Pure.

The order of the checks is the order in which a reason helps its reader most: what went wrong first, then what is
missing, then what is right but not wanted. What comes out later (`undelivered`, `superseded`) is not judged here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agl_runtime.calls import VersionSpan
from agl_runtime.gateway.internal import Answer, Json
from agl_runtime.schemas import Mode, Model

# What model servers fill in from a model's own `generation_config.json`, with the value that changes nothing.
PLAIN = {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
# What changes the distribution that tokens are sampled from, with the value that changes nothing beside null and empty.
_NEUTRAL = {
    **PLAIN,
    **dict.fromkeys(("typical_p", "length_penalty"), 1),
    **dict.fromkeys(("min_tokens", "use_beam_search"), 0),
    **dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "structured_outputs"), 0),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), 0),
}


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known of a call beside its answer. `dispatched` is the server as it was registered when the call was
    sent, `present` as it is now."""

    mode: Mode
    policy: str
    dispatched: Model
    present: Model | None
    auxiliary: bool
    changed_params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`spans` are the policy versions of the sampled tokens, as far as they are known."""

    trainable: bool
    reason: str | None
    spans: tuple[VersionSpan, ...]


def judge(answer: Answer, around: Circumstances) -> Verdict:
    spans = _spans(answer, around)
    reason = _fault(answer, around) or _missing(answer) or _unwanted(spans, around)
    return Verdict(reason is None, reason, spans)


def changed_params(body: Json) -> tuple[str, ...]:
    """Names of the request's parameters that change the distribution which tokens are sampled from."""
    names = [name for name, value in body.items() if name in _NEUTRAL and value not in (None, _NEUTRAL[name], {}, [])]
    if body.get("top_k") == 0:
        names.remove("top_k")
    wanted_format = body.get("response_format")
    if isinstance(wanted_format, dict) and wanted_format.get("type") not in (None, "text"):
        names.append("response_format")
    if body.get("tool_choice") not in (None, "auto", "none"):
        names.append("tool_choice")
    return tuple(names)


def _fault(answer: Answer, around: Circumstances) -> str | None:
    if answer.finish_reason is None:
        return "cut"
    if around.mode == "val":
        return "validation"
    if around.dispatched.model != around.policy or answer.model not in (None, around.policy):
        return "auxiliary" if around.auxiliary else "wrong_model"
    return "multiple_choices" if answer.choices > 1 else None


def _missing(answer: Answer) -> str | None:
    prompt, sampled, logprobs = answer.prompt_ids, answer.sampled_ids, answer.logprobs
    if not prompt.size:
        return "no_prompt_ids"
    if not sampled.size:
        return "empty_generation" if answer.usage.get("completion_tokens") == 0 else "no_sampled_ids"
    counted = (answer.usage.get("prompt_tokens"), prompt.size), (answer.usage.get("completion_tokens"), sampled.size)
    if any(isinstance(said, int) and said > size for said, size in counted):
        return "ids_missing"
    if not logprobs.size:
        return "no_logprobs"
    if logprobs.size != sampled.size:
        return "logprobs_length"
    return None if bool(np.isfinite(logprobs).all()) else "logprobs_not_finite"


def _unwanted(spans: tuple[VersionSpan, ...], around: Circumstances) -> str | None:
    if not spans:
        return "mixed_versions"
    if around.changed_params:
        return "distribution_changed"
    return "auxiliary" if around.auxiliary else None


def _spans(answer: Answer, around: Circumstances) -> tuple[VersionSpan, ...]:
    """The server's own spans; without any, one span of the registered version if that stayed the same."""
    if answer.spans is not None:
        return answer.spans
    version, present = around.dispatched.policy_version, around.present
    same = present is not None and version == present.policy_version
    return (VersionSpan(0, answer.sampled_ids.size, version),) if same else ()
