"""What is sent on in place of the harness's request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from agl_runtime.config import Config
from agl_runtime.gateway.fidelity import PLAIN, changed_params
from agl_runtime.gateway.internal import CallRefused, Json, ModelRequest
from agl_runtime.gateway.parents import as_sampled
from agl_runtime.schemas import Mode, Model


@dataclass(frozen=True, slots=True)
class Prepared:
    """`changed_params` name what changes the distribution that tokens are sampled from. `streams`: the model server is
    asked for a stream; it may not be though the harness is."""

    body: Json
    changed_params: tuple[str, ...]
    streams: bool

    def dump(self, server: Model, sampled: Mapping[str, str]) -> bytes:
        """What is sent to `server`; `sampled` are the arguments of known tool calls. The salt keeps what older weights
        made of the same prefix, and a server has in its cache, out of this call."""
        salt, own = str(server.policy_version), self.body.get("cache_salt")
        body = {**self.body, "model": server.model, "cache_salt": salt if own is None else f"{salt} {own}"}
        if sampled and isinstance(body.get("messages"), list):
            body["messages"] = [as_sampled(message, sampled) for message in body["messages"]]
        return orjson.dumps(body)


def prepare(request: ModelRequest, mode: Mode, config: Config) -> Prepared:
    """Force what training needs: temperature, the whole distribution where the harness does not narrow it itself, token
    ids and log-probabilities; and the one name for instructions that templates know. Raises CallRefused."""
    changed = changed_params(request.body)
    if changed and mode == "train" and config.gateway.distribution_params == "refuse":
        raise CallRefused(
            f"{', '.join(changed)} would change the distribution that the policy is trained on.",
            "Leave it out, or set gateway.distribution_params to record.",
            http_status=400,
        )
    temperature = config.train.temperature if mode == "train" else config.eval.temperature
    left_open = {name: value for name, value in PLAIN.items() if request.body.get(name) is None}
    body = {**request.body, **left_open, "return_token_ids": True, "temperature": temperature}
    if mode == "train":
        body["logprobs"] = request.operation == "chat/completions" or _alternatives(request.body.get("logprobs"))
    if isinstance(body.get("messages"), list):
        body["messages"] = [with_known_role(message) for message in body["messages"]]
    streams = request.stream and not (mode == "train" and config.train.routing_replay)  # streams tell no experts
    if streams:
        body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    elif request.stream:
        body = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    return Prepared(body, changed, streams)


def with_known_role(message: Any) -> Any:
    """Many templates pass over a `developer` in silence."""
    is_developer = isinstance(message, dict) and message.get("role") == "developer"
    return {**message, "role": "system"} if is_developer else message


def _alternatives(asked: object) -> int:
    """How many the completions API is asked for: its way to ask for the sampled tokens' log-probabilities."""
    return max(asked, 1) if type(asked) is int else 1
