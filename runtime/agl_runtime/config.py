"""The project's configuration: agl.yaml, AGL_CFG_* variables and flags, read once into a frozen `Config`.

A value given by a flag beats the environment, which beats agl.yaml, which beats the default. An environment variable
names a setting by its path with two underscores between levels: AGL_CFG_TRAIN__LR=1e-4. An unknown key is an error
that names the nearest known one. Relative paths are relative to the folder of agl.yaml.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agl_runtime.errors import ConfigError
from agl_runtime.schemas import Endpoint

CONFIG_NAME = "agl.yaml"
STATE_DIR = ".agl"
ENV_PREFIX = "AGL_CFG_"
EMBEDDED_ALGORITHMS = ("grpo", "dr_grpo", "rloo")
VERL_ALGORITHMS = (
    *EMBEDDED_ALGORITHMS,
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "grpo_passk",
)
TRACKERS = ("console", "tensorboard", "wandb", "mlflow", "swanlab", "clearml", "trackio")
RESERVED_ENV = frozenset({"AGL_KEY", "AGL_OPENAI_BASE_URL", "AGL_EVENT_URL"})


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class AgentConfig(_Section):
    command: str | list[str]
    """How the agent is started, in its workspace. `{field}` is replaced by that field of the task, always inside one
    argument; `{task_file}` by the path of a JSON file that holds the whole task; `{{` is a literal brace."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables for the agent, with the same `{field}` replacement."""
    pass_env: list[str] = Field(default_factory=list)
    """Names of variables of your shell that the agent also gets (PATH, LANG, LC_*, TZ, VIRTUAL_ENV and the like are
    always passed; HOME and TMPDIR are private to each rollout)."""
    home_files: list[str] = Field(default_factory=list)
    """Files or folders of your home, relative to it, that the private HOME shows read-only."""
    warm: bool | list[str] = False
    """Start a Python agent by forking a process that has imported these modules once (`true`: no module, only Python
    itself). Where a fork cannot do it, agents start cold, and the reason is told."""
    workspace: Literal["empty", "copy", "worktree"] = "copy"
    """What the agent's working directory holds: nothing, a copy of the project's tracked files, or a git worktree."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Time limit of one rollout in seconds, not counting time in which the gateway held its calls."""
    concurrency: int | None = Field(default=None, ge=1)
    """Agents that run at once; from cores and memory when not set."""
    memory_mb: int = Field(default=256, ge=16)
    """What one agent is expected to need, in MiB, for the automatic concurrency."""
    disk_mb: int | None = Field(default=None, ge=1)
    """Most that the workspace, HOME and TMPDIR of one rollout may take on disk, in MiB, with what the workspace began
    with. An agent that takes more is ended, and its rollout fails with this reason. No limit when not set."""
    attempts: int = Field(default=3, ge=1, le=20)
    """Tries at a rollout when the infrastructure (not the agent) fails."""
    isolation: Literal["auto", "required", "off"] = "auto"
    """Separate agents from agl and from each other by namespaces: where the system allows it, always (an error where
    it does not), or never."""
    output_limit_kb: int = Field(default=1024, ge=1)
    """How much of stdout and of stderr is kept a rollout, in KiB; the rest is counted and dropped."""
    reports_reward: bool = False
    """The agent posts its own reward event; no reward function runs and its key may post one."""

    @field_validator("isolation", mode="before")
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        return "off" if value is False else value  # YAML reads a bare `off` as false


class RewardConfig(_Section):
    function: str | None = None
    """`file.py:name`. Called with task, workspace, exit, output and events; returns a number, or a mapping with
    `reward` and named parts."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one call in seconds; past it the attempt counts as an infrastructure failure."""
    python: str | None = None
    """Interpreter for the reward function; the first `python3` on your PATH when not set."""


class DataConfig(_Section):
    train: str | None = None
    """JSON Lines file of training tasks, one object a line."""
    val: str | None = None
    """JSON Lines file of held-out tasks."""
    shuffle: bool = True
    """Take the training tasks in a new random order each epoch; in file order when false."""


class ModelConfig(_Section):
    path: str | None = None
    """Hugging Face folder of the policy to start from."""
    name: str = "policy"
    """The name under which agents ask for the policy."""
    endpoint: Endpoint | None = None
    """OpenAI-compatible base URL (with /v1) of a running model server to record from. Only `agl run` and `agl eval`
    can use it: such a server's weights are not agl's to train."""
    api_key: SecretStr | None = None
    """Key for `endpoint`."""
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens sampled a call, unless the agent asks for fewer."""
    context: int | None = Field(default=None, ge=16)
    """Context length in tokens; the model's own when not set."""


class GatewayConfig(_Section):
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs the admin key, which `agl up` makes."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    hold_limit_s: float = Field(default=240.0, gt=0)
    """Longest time that a call is held while weights change or the model server cannot be reached; then 429 with
    Retry-After. Keep it below the shortest time-out of the agent's client."""
    upstream_timeout_s: float = Field(default=600.0, gt=0)
    """Longest silence of the model server within a call."""
    upstream_retries: int = Field(default=4, ge=0, le=20)
    """Tries after the first, while no byte of an answer has come. A server that cannot be reached is waited for, up to
    `hold_limit_s`."""
    distribution_params: Literal["refuse", "record"] = "record"
    """Calls in train mode that set top_p, top_k, penalties, min_p or logit_bias: refuse them, or record them as not
    trainable unless the server's log-probabilities are those of the changed distribution."""
    models: dict[str, str] = Field(default_factory=dict)
    """What the names that agents ask for mean; of patterns with `*` the first that fits counts. `policy` (the value of
    `model.name`): its calls are main work. Any other name: a side job such as a title, recorded as `auxiliary` and not
    trained on, answered by the model registered under that name or else by the policy. A name that fits none of them is
    a side job in a rollout that has asked for the policy by its name; else it means the policy."""
    max_pending_mb: int = Field(default=1024, ge=64)
    """Most MB of requests that are held or served at once, a call being at least 1/16 MB; a call beyond gets 429 with
    Retry-After."""
    keep_rollouts: int = Field(default=20_000, ge=1)
    """Finished rollouts kept in the store; the oldest beyond are deleted."""


class TrainConfig(_Section):
    backend: Literal["embedded", "verl"] = "embedded"
    """What trains: `embedded` is one process on this machine; `verl` is Ray, FSDP or Megatron, and vLLM, on any number
    of GPUs (docs/verl.md)."""
    algorithm: str = "grpo"
    """How rewards of a group become advantages: grpo, dr_grpo or rloo; with the verl backend also reinforce_plus_plus,
    reinforce_plus_plus_baseline, opo, gpg or grpo_passk."""
    gpus: int = Field(default=1, ge=1)
    """GPUs of a node. Only the verl backend uses more than one."""
    nodes: int = Field(default=1, ge=1)
    """Machines that train together, joined by Ray. Only the verl backend uses more than one."""
    verl: dict[str, Any] = Field(default_factory=dict)
    """Settings of verl by verl's own names, nested or dotted, that agl hands on: any that agl does not decide itself.
    Only the verl backend has them."""
    trackers: list[str] = Field(default_factory=lambda: ["console"])
    """Where verl also writes its metrics: console, tensorboard, wandb, mlflow, swanlab, clearml, trackio. Only the verl
    backend has them; metrics.jsonl is always written."""
    steps: int = Field(default=100, ge=1)
    """Policy updates in the run."""
    groups_per_step: int = Field(default=8, ge=1)
    """Tasks whose groups make one update."""
    active_groups: int | None = Field(default=None, ge=1)
    """Groups under way at once. Not set: as many as make one update, which is synchronous training. More: agents go on
    through updates, and groups that are unfinished then are trained on later, by newer weights than sampled them."""
    max_staleness: int | None = Field(default=4, ge=0)
    """Updates that a group may lag behind the weights that are trained on it; an older one is dropped. When null none
    is dropped, and `tis_cap` alone corrects what is stale."""
    group_size: int = Field(default=8, ge=2)
    """Rollouts of each task that are compared."""
    lr: float = Field(default=1e-6, gt=0)
    """AdamW learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped at 1 + clip_high."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty to the starting policy; 0 loads no reference. With the verl
    backend it is taken at the policy before the update (docs/verl.md)."""
    tis_cap: float | None = Field(default=2.0, gt=0)
    """Cap of the truncated importance weight of stale tokens; none when null."""
    routing_replay: bool = False
    """Train each token of a Mixture-of-Experts by the experts that the model server chose for it (R3), which needs vLLM
    on GPUs; the gateway then asks for whole answers, and a harness that streams gets each at its end. Only the verl
    backend has it."""
    normalization: Literal["rollout", "sample", "token"] = "rollout"
    """Over what the loss is averaged."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps an epoch over the batch."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    token_budget: int = Field(default=8192, ge=16)
    """Most tokens (with padding) in one forward pass of the update; with the verl backend on each GPU, and at least one
    sample of full length."""
    max_response_tokens: int = Field(default=8192, ge=1)
    """Response side of a sample is cut at this many tokens."""
    max_prompt_tokens: int = Field(default=8192, ge=1)
    """A sample whose first prompt is longer is dropped, with a count."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training rollouts."""
    seed: int = 0
    """Seeds data order, sampling and the optimizer's RNG."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where training runs. On the CPU the verl backend is for trying out only."""
    threads: int = Field(default=1, ge=1)
    """torch CPU threads, of each process where the verl backend trains on the CPU; more than one is slower for small
    models."""
    max_batch: int = Field(default=64, ge=1)
    """Most sequences that the embedded backend decodes at once."""
    save_every: int = Field(default=1, ge=1)
    """Updates between checkpoints."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Checkpoints kept on disk; the newest."""
    no_signal_steps: int = Field(default=2, ge=1)
    """After this many first steps without any spread of rewards the run stops with "no signal"."""

    @field_validator("active_groups")
    @classmethod
    def _holds_a_batch(cls, value: int | None, info: ValidationInfo) -> int | None:
        batch = info.data.get("groups_per_step", 1)
        if value is not None and value < batch:
            raise ValueError(f"must be at least train.groups_per_step, which is {batch}")
        return value

    @model_validator(mode="after")
    def _honoured(self) -> TrainConfig:
        """A value that the backend could not honour is refused, never ignored."""
        own, other = (EMBEDDED_ALGORITHMS, "verl") if self.backend == "embedded" else (VERL_ALGORITHMS, "embedded")
        if self.algorithm not in own:
            raise ValueError(f"algorithm {self.algorithm} is none of the {self.backend} backend's: {', '.join(own)}")
        for name in ("gpus", "nodes", "verl", "trackers", "routing_replay") if other == "verl" else ("max_batch",):
            if getattr(self, name) != TrainConfig.model_fields[name].get_default(call_default_factory=True):
                raise ValueError(
                    f"only the {other} backend has train.{name}; remove it, or set train.backend to {other}"
                )
        if unknown := set(self.trackers) - set(TRACKERS):
            raise ValueError(f"train.trackers: {', '.join(sorted(unknown))} is none of {', '.join(TRACKERS)}")
        return self


class EvalConfig(_Section):
    every: int = Field(default=0, ge=0)
    """Validate after every so many updates; 0 only before the first and after the last."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of validation rollouts."""
    samples: int = Field(default=1, ge=1)
    """Rollouts of each validation task."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first so many validation tasks."""


class Config(_Section):
    agent: AgentConfig
    reward: RewardConfig = RewardConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, values: Any) -> Any:
        """A section whose lines are all commented out reads as null in YAML and means the defaults."""
        if not isinstance(values, dict):
            return values
        return {key: {} if value is None and key in cls.model_fields else value for key, value in values.items()}

    @model_validator(mode="after")
    def _reserved_names(self) -> Config:
        taken = RESERVED_ENV & (set(self.agent.env) | set(self.agent.pass_env))
        if taken:
            raise ValueError(f"agent.env: {', '.join(sorted(taken))} are set by agl for each rollout; remove them")
        if self.agent.reports_reward and self.reward.function:
            raise ValueError("agent.reports_reward: the agent or reward.function gives the reward, not both")
        return self


@dataclass(frozen=True)
class Project:
    """A folder with its effective configuration; `origins` maps each set path ("train.lr") to where it came from."""

    root: Path
    config: Config
    origins: Mapping[str, str]

    @property
    def state_dir(self) -> Path:
        return self.root / STATE_DIR

    def path(self, relative: str) -> Path:
        return self.root / Path(relative).expanduser()


def load_project(
    start: Path, *, overrides: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> Project:
    """Find agl.yaml in `start` or above it and read it. `overrides` are flags, by path. Raises ConfigError."""
    file = find_config(start)
    values = _read_yaml(file)
    origins = dict.fromkeys(_leaf_paths(values), CONFIG_NAME)
    for path, text, origin in _layers(environ if environ is not None else os.environ, overrides or {}):
        _set_path(values, path, _value(text, origin), origin)
        origins[path] = origin
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, file, origins), "See `agl config show` for every setting.") from error
    return Project(file.parent, config, origins)


def find_config(start: Path) -> Path:
    """The agl.yaml that governs `start`. Raises ConfigError."""
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / CONFIG_NAME).is_file():
            return folder / CONFIG_NAME
    raise ConfigError(f"No {CONFIG_NAME} in {start} or above it.", "Run `agl init` in your agent's folder first.")


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file} is not valid YAML: line {line}: {error.problem}.", "Correct the file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}.", "Correct the file.") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.", "Check its permissions.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no mapping.", "Start from what `agl init` writes.")
    return values


def _layers(environ: Mapping[str, str], overrides: Mapping[str, str]) -> list[tuple[str, str, str]]:
    from_env = [
        (name.removeprefix(ENV_PREFIX).lower().replace("__", "."), text, name)
        for name, text in sorted(environ.items())
        if name.startswith(ENV_PREFIX)
    ]
    return from_env + [(path, text, f"--set {path}") for path, text in overrides.items()]


def _value(text: str, origin: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: {text!r} is no YAML value.", "Quote it as you would in a YAML file.") from error


def _set_path(values: dict[str, Any], path: str, value: Any, origin: str) -> None:
    *parents, last = path.split(".")
    for key in parents:
        if values.get(key) is None:  # also a section whose lines are all commented out
            values[key] = {}
        node = values[key]
        if not isinstance(node, dict):
            raise ConfigError(f"{origin}: {key} is not a section of {CONFIG_NAME}.", "Name a setting by its full path.")
        values = node
    values[last] = value


def _leaf_paths(values: Any, prefix: str = "") -> list[str]:
    if not isinstance(values, dict):
        return [prefix]
    return [leaf for key, value in values.items() for leaf in _leaf_paths(value, f"{prefix}.{key}".lstrip("."))]


def setting_paths() -> list[str]:
    """Every setting by its path, in the order of the sections."""
    return [f"{name}.{key}" for name, section in _sections().items() for key in section.model_fields]


def _sections() -> dict[str, type[_Section]]:
    return {name: field.annotation for name, field in Config.model_fields.items()}  # type: ignore[misc]


def _explain(error: ValidationError, file: Path, origins: Mapping[str, str]) -> str:
    lines = []
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
        path = ".".join(parts)
        above = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        origin = next((origins[name] for name in above if name in origins), file.name)
        if item["type"] == "extra_forbidden":
            lines.append(f"{origin}: unknown setting `{path}`{_nearest(path)}")
        elif item["type"] == "missing":
            lines.append(f"{file.name}: `{path}` is missing.")
        else:
            lines.append(f"{origin}: `{path}`: {item['msg'].removeprefix('Value error, ')}.")
    return " ".join(dict.fromkeys(lines))


def _nearest(path: str) -> str:
    known = [*setting_paths(), *Config.model_fields]
    last = path.rsplit(".", 1)[-1]
    same_name = [k for k in known if k.split(".")[-1] == last]
    close = same_name[:1] or difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else "."


__all__ = [
    "CONFIG_NAME",
    "RESERVED_ENV",
    "STATE_DIR",
    "AgentConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "GatewayConfig",
    "ModelConfig",
    "Project",
    "RewardConfig",
    "TrainConfig",
    "find_config",
    "load_project",
    "setting_paths",
]
