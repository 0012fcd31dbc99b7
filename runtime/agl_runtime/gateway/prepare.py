"""What is sent on in place of the harness's request. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import orjson

from agl_runtime.config import Config
from agl_runtime.gateway.fidelity import changed_params
from agl_runtime.gateway.internal import CallRefused, Json, ModelRequest
from agl_runtime.schemas import Mode


@dataclass(frozen=True, slots=True)
class Sampling:
    """How calls are sampled: the temperatures of the two modes, and what happens to calls that change the rest."""

    train_temperature: float
    val_temperature: float
    distribution_params: Literal["refuse", "record"]

    @classmethod
    def of(cls, config: Config) -> Sampling:
        return cls(config.train.temperature, config.eval.temperature, config.gateway.distribution_params)


@dataclass(frozen=True, slots=True)
class Prepared:
    """`changed_params` name what changes the distribution that tokens are sampled from."""

    body: Json
    changed_params: tuple[str, ...]

    def dump(self, model: str) -> bytes:
        """What is sent to a server of the model `model`. Raises CallRefused."""
        try:
            return orjson.dumps({**self.body, "model": model})
        except orjson.JSONEncodeError as error:
            raise CallRefused("The request cannot be sent on as JSON: it is nested too deeply.", status=400) from error


def prepare(request: ModelRequest, mode: Mode, sampling: Sampling) -> Prepared:
    """Force what training needs: temperature, token ids and log-probabilities. Raises CallRefused."""
    changed = changed_params(request.body)
    if changed and mode == "train" and sampling.distribution_params == "refuse":
        raise CallRefused(
            f"{', '.join(changed)} would change the distribution that the policy is trained on.",
            "Leave it out, or set gateway.distribution_params to record.",
            status=400,
        )
    body = {**request.body, "return_token_ids": True, "temperature": sampling.val_temperature}
    if mode == "train":
        body |= {"temperature": sampling.train_temperature, "logprobs": _logprobs(request)}
    if request.stream:
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return Prepared(body, changed)


def _logprobs(request: ModelRequest) -> bool | int:
    """In the completions API the number of alternatives, of which one is asked for where the harness asked for none."""
    if request.operation == "chat/completions":
        return True
    asked = request.body.get("logprobs")
    return max(asked, 1) if type(asked) is int else 1
