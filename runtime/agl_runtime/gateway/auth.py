"""Who may do what: pure decisions over keys, methods and paths.

There are two kinds of key. The admin key opens everything. An agent's key names one rollout, attempt and mode and
carries a keyed digest of them under the admin key, so that none is stored: it may call the model below its own path and
post events for its own attempt. Whatever is not allowed here is refused, also on routes added later.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import orjson

from agl_runtime.schemas import Mode

AGENT_PREFIX = "agl-agent-"
OPEN_PATHS = frozenset({"/healthz", "/openapi.json"})
RESERVED_EVENTS = frozenset({"model_request", "agent_exit", "upstream_failure"})
_PROXY = re.compile(r"/proxy/rollout/(?P<rollout_id>[^/]+)/attempt/(?P<attempt_id>[^/]+)/mode/(?P<mode>[^/]+)/.+")
_HELLO = re.compile(r"/proxy/rollout/[^/]+/attempt/[^/]+/mode/[^/]+/anthropic/api/hello")
_EVENTS = re.compile(r"/api/rollouts/(?P<rollout_id>[^/]+)/attempt/(?P<attempt_id>[^/]+)/events")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key it was: the administrator's, or that of one rollout's agent."""

    role: Literal["admin", "agent"]
    rollout_id: str = ""
    attempt_id: str = ""
    mode: Mode = "train"


@dataclass(frozen=True, slots=True)
class Denial:
    status: Literal[401, 403]
    sentence: str


NO_KEY = Denial(401, "The key is missing or wrong; send it as `Authorization: Bearer` or as `x-api-key`.")


def agent_key(admin_key: str, rollout_id: str, attempt_id: str, mode: Mode) -> str:
    """The key of one attempt's agent: the names it is for, and their digest under the admin key."""
    names = orjson.dumps([rollout_id, attempt_id, mode])
    return f"{AGENT_PREFIX}{names.hex()}.{_mac(admin_key, names)}"


def identify(admin_key: str, headers: Mapping[str, str]) -> Caller | None:
    """Whose key the request carries; None without a key that counts. `headers` has lower-case names."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    offered = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    return next((caller for key in offered if key and (caller := _caller(admin_key, key))), None)


def judge(caller: Caller | None, method: str, path: str) -> Denial | None:
    """Why this caller may not make this request; None when it may."""
    if (path in OPEN_PATHS or _HELLO.fullmatch(path)) and method in ("GET", "HEAD"):
        return None
    if caller is None:
        return NO_KEY
    if caller.role == "admin":
        return None
    if match := _PROXY.fullmatch(path):
        return None if _is_own(caller, match) else Denial(403, "This agent's key is for another rollout's model path.")
    if method == "POST" and (match := _EVENTS.fullmatch(path)):
        return None if _is_own(caller, match) else Denial(403, "An agent's key posts events for its own attempt only.")
    return Denial(403, "An agent's key may call its own model path and post its own events, and nothing else.")


def judge_event(caller: Caller, event_type: str, *, may_reward: bool) -> Denial | None:
    """Why this caller may not post an event of this type for its own attempt; None when it may."""
    if caller.role == "admin":
        return None
    if event_type in RESERVED_EVENTS:
        return Denial(403, f"Events of the type {event_type} are written by agl itself.")
    if event_type == "reward" and not may_reward:
        return Denial(403, "This project's agents do not report their own reward; see agent.reports_reward.")
    return None


def _is_own(caller: Caller, match: re.Match[str]) -> bool:
    named = match.groupdict(default="")
    own = (caller.rollout_id, caller.attempt_id) == (named["rollout_id"], named["attempt_id"])
    return own and named.get("mode", caller.mode) == caller.mode


def _caller(admin_key: str, key: str) -> Caller | None:
    if hmac.compare_digest(key.encode(), admin_key.encode()):
        return Caller("admin")
    names_text, _, mac = key.removeprefix(AGENT_PREFIX).partition(".")
    try:
        names = bytes.fromhex(names_text)
    except ValueError:
        return None
    if not hmac.compare_digest(mac.encode(), _mac(admin_key, names).encode()):
        return None
    rollout_id, attempt_id, mode = cast(list[Any], orjson.loads(names))
    return Caller("agent", rollout_id, attempt_id, mode)


def _mac(admin_key: str, names: bytes) -> str:
    secret = hashlib.blake2b(admin_key.encode()).digest()
    return hashlib.blake2b(names, key=secret, person=b"agl agent key", digest_size=32).hexdigest()
