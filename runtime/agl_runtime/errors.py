"""Every error that agl raises on purpose.

    AglError
    ├── ConfigError          agl.yaml, a flag, an environment variable or a task file is wrong
    ├── PreconditionError    something that must be there is not (a package, a free port, a GPU)
    ├── StoreError           the store could not read or keep something
    ├── GatewayError         the gateway answered with an error or not at all
    │   ├── NotFoundError
    │   ├── ConflictError    a transition or a call that the present state forbids
    │   └── KeyRefusedError
    ├── UpstreamError        the model server failed, stayed silent or answered nonsense
    ├── RunnerError          an agent could not be started or watched (infrastructure)
    ├── AgentError           the agent itself failed; this is data, kept with the rollout
    ├── RewardError          the reward function raised, timed out or returned no finite number
    └── TrainerError         samples, update or checkpoint

An error says what is wrong with which thing (`what`) and what to do (`fix`); each is one sentence.
"""

from __future__ import annotations


class AglError(Exception):
    """Base of the tree. `str()` gives both sentences."""

    def __init__(self, what: str, fix: str = "") -> None:
        self.what = what
        self.fix = fix
        super().__init__(f"{what} {fix}".strip())


class ConfigError(AglError):
    pass


class PreconditionError(AglError):
    pass


class StoreError(AglError):
    pass


class GatewayError(AglError):
    """`status` is the HTTP status that the gateway answered, or None when it did not answer."""

    def __init__(self, what: str, fix: str = "", *, status: int | None = None) -> None:
        super().__init__(what, fix)
        self.status = status


class NotFoundError(GatewayError):
    pass


class ConflictError(GatewayError):
    pass


class KeyRefusedError(GatewayError):
    pass


class UpstreamError(AglError):
    """`status` is what the model server answered, or None when it did not answer."""

    def __init__(self, what: str, fix: str = "", *, status: int | None = None) -> None:
        super().__init__(what, fix)
        self.status = status


class RunnerError(AglError):
    pass


class AgentError(AglError):
    pass


class RewardError(AglError):
    pass


class TrainerError(AglError):
    pass
