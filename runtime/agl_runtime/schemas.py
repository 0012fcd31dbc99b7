"""The data that crosses a process boundary as JSON.

The shapes of rollouts, events and models are those of Agent Lightning v1.0's HTTP API, so that programs written for
it talk to this gateway unchanged; what agl adds is optional and has a default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

Mode = Literal["train", "val"]


class PolicyVersion(NamedTuple):
    """Names one set of serving weights for ever: (run epoch, number of updates)."""

    epoch: int
    updates: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.updates}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Inverse of `str()`; raises ValueError for anything else."""
        epoch, updates = text.split(".")
        return cls(int(epoch), int(updates))


class RolloutState(StrEnum):
    QUEUING = "queuing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


TERMINAL_STATES = frozenset({RolloutState.SUCCEEDED, RolloutState.FAILED})

ALLOWED_TRANSITIONS: dict[RolloutState, frozenset[RolloutState]] = {
    RolloutState.QUEUING: frozenset({RolloutState.RUNNING, RolloutState.FAILED}),
    RolloutState.RUNNING: TERMINAL_STATES,
    RolloutState.SUCCEEDED: frozenset(),
    RolloutState.FAILED: frozenset(),
}

DEFAULT_ATTEMPT_ID = "0"


class LocalConfig(BaseModel):
    """How a v1.0 controller starts a rollout; agl's own controller reads agl.yaml instead."""

    agent_class: str | None = None
    env_map: dict[str, str] = Field(default_factory=dict)


class K8sConfig(BaseModel):
    job_template: str | None = None


class RolloutConfig(BaseModel):
    timeout_seconds: int = 3600
    local: LocalConfig | None = None
    k8s: K8sConfig | None = None


class RolloutMetadata(BaseModel):
    """Free keys. agl's trainer sets `run_id`, `group_id`, `task_id`, `index` and `step`."""

    model_config = ConfigDict(extra="allow")

    batch_idx: int | None = None
    sample_idx_in_batch: int | None = None


class RolloutCreate(BaseModel):
    """One rollout to enqueue. An id that exists already returns the existing rollout unchanged."""

    input: Any
    is_train: bool = True
    config: RolloutConfig | None = None
    metadata: RolloutMetadata | None = None
    rollout_id: str | None = Field(default=None, min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:-]+$")


class RolloutStatus(BaseModel):
    state: RolloutState = RolloutState.QUEUING
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None
    version: int = 1
    created_at: float
    updated_at: float


class RolloutStatusPatch(BaseModel):
    model_config = ConfigDict(extra="forbid")

    state: RolloutState | None = None
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None


class RolloutPatch(BaseModel):
    model_config = ConfigDict(extra="forbid")

    status: RolloutStatusPatch | None = None


class Rollout(BaseModel):
    rollout_id: str
    input: Any
    is_train: bool = True
    config: RolloutConfig
    metadata: RolloutMetadata = Field(default_factory=RolloutMetadata)
    status: RolloutStatus

    @property
    def mode(self) -> Mode:
        return "train" if self.is_train else "val"


class RolloutDetail(BaseModel):
    rollout: Rollout
    attempts: list[str]


class TerminalItem(BaseModel):
    rollout_id: str
    state: RolloutState
    data_id: str
    is_train: bool


class TerminalPage(BaseModel):
    """A page of finished rollouts in order of completion; `next_after` is the cursor of the next page."""

    items: list[TerminalItem]
    next_after: int
    total_terminal: int


class EventCreate(BaseModel):
    """An event to append. A second one with the same `event_id` is the first one sent again."""

    event_type: str
    data: dict[str, Any] = Field(default_factory=dict)
    event_id: str | None = None


class Event(BaseModel):
    event_type: str
    rollout_id: str
    attempt_id: str
    timestamp: float
    data: dict[str, Any]


def _address(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError("an address of a model server begins with http:// or https:// and a host")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("an address of a model server holds no user, query or fragment; its key is api_key")
    return endpoint


Endpoint = Annotated[str, AfterValidator(_address)]


class Model(BaseModel):
    """A model server. `endpoint` is its OpenAI base, with `/v1`. (`run_epoch`, `version`) is its policy version.

    `api_key` is what the server wants to be called with. It is no part of any dump: whoever sends it says so.
    """

    model: str
    endpoint: Endpoint
    version: int = 0
    run_epoch: int = 0
    api_key: SecretStr | None = Field(default=None, exclude=True)

    @property
    def policy_version(self) -> PolicyVersion:
        return PolicyVersion(self.run_epoch, self.version)


class PauseRequest(BaseModel):
    retry_after_seconds: int = 5
    reason: str | None = None


class ProxyState(BaseModel):
    """`inflight` counts calls that are at a model server; a held call is not one of them."""

    paused: bool
    retry_after_seconds: int
    reason: str | None
    inflight: int
    held: int = 0


class ClaimRequest(BaseModel):
    """A controller asks for work: up to `limit` rollouts, waiting up to `wait` seconds for the first.

    `held` names the rollouts that it runs already: what is leased to it beside them (its last answer was lost, or it
    began anew) is granted again.
    """

    controller_id: str
    held: list[str] = Field(default_factory=list)
    limit: int = Field(default=1, ge=1, le=1000)
    wait: float = Field(default=0.0, ge=0.0, le=60.0)
    lease_s: float = Field(default=30.0, gt=0.0, le=3600.0)


class Grant(BaseModel):
    """One attempt that a controller may run: what the agent's environment needs beside the task."""

    rollout: Rollout
    attempt_id: str
    agent_key: str = Field(repr=False)


class LeaseRenewal(BaseModel):
    controller_id: str
    rollout_ids: list[str]
    lease_s: float = Field(default=30.0, gt=0.0, le=3600.0)


class LeaseState(BaseModel):
    """What a renewal answers: the leases lost, and seconds that the gateway has held calls since it started; `gateway`
    names this start of it."""

    lost: list[str]
    held_total_s: float
    gateway: str


class PartStatus(BaseModel):
    """What one running part says of itself. `detail` holds plain numbers and texts, never a secret."""

    part: Literal["gateway", "controller", "trainer"]
    pid: int
    state: str
    waiting_for: str | None = None
    detail: dict[str, Any] = Field(default_factory=dict)
    updated_at: float = 0.0


class NextAttempt(BaseModel):
    """Seal the attempt `after` and begin another; when another has begun already, that one is granted again."""

    controller_id: str
    after: str


class CheckpointRecord(BaseModel):
    """What was trained into a checkpoint: kept in the store beside the rollouts themselves."""

    run_id: str
    version: str
    step: int
    path: str
    rollout_ids: list[str]


class Change(BaseModel):
    """One line of the change stream. `kind` names what changed and `data` holds its new state."""

    seq: int
    kind: Literal["rollout", "models", "proxy", "part", "checkpoint"]
    data: dict[str, Any]
