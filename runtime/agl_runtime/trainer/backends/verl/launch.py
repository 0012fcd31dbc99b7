"""A verl run from the trainer's side: starts Ray and verl, waits, and says how it ended.

verl's own loop does the work, in Ray's processes, which end with this one. What they tell becomes agl's metrics and
the trainer's status (`follow`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from agl_runtime.client import GatewayClient
from agl_runtime.config import Config, Project
from agl_runtime.errors import AglError, ConfigError, TrainerError
from agl_runtime.trainer import diagnosis, state
from agl_runtime.trainer.backends.verl import before, cluster
from agl_runtime.trainer.backends.verl.compose import compose, missing
from agl_runtime.trainer.backends.verl.families import read_family
from agl_runtime.trainer.backends.verl.follow import Follower
from agl_runtime.trainer.backends.verl.resume import verl_folder
from agl_runtime.trainer.backends.verl.settings import Paths, overrides
from agl_runtime.trainer.backends.verl.setup import RUN_EPOCH, SERVER_KEY, Ending, Setup
from agl_runtime.trainer.metrics import MetricsLog, Outcome
from agl_runtime.trainer.progress import Progress
from agl_runtime.trainer.scoring import NO_SPREAD

PLUGIN = "agl_runtime.trainer.backends.verl.plugin"
MODULES = "VERL_USE_EXTERNAL_MODULES"
FOLLOW_EVERY_S = 0.25
NO_TOKENS = "no model call can be trained on"
STARTING = "starting Ray and verl (a minute or two)"
TRACKERS = "trackers"
TRACKER_PLACES = {
    "tensorboard": {"TENSORBOARD_DIR": "{folder}/{run}"},
    "wandb": {"WANDB_DIR": "{folder}"},
    "mlflow": {
        "MLFLOW_TRACKING_URI": "sqlite:///{folder}/mlflow.db",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": "{folder}/artifacts",  # a database has no other say; else the working folder
    },
    "swanlab": {"SWANLAB_LOG_DIR": "{folder}"},
}
"""The variables that say where a tracker writes, and agl's values. The other trackers keep to the user's home."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """What a run begins with; `newest` is the checkpoint that it goes on from."""

    project: Project
    client: GatewayClient
    run: state.Run
    run_epoch: int
    newest: state.Checkpoint | None
    metrics: MetricsLog
    progress: Progress


async def train(start: Start, stop: asyncio.Event) -> Outcome:
    """Raises TrainerError when verl fails, PreconditionError where a package is missing."""
    setup = _setup(start)
    setup.write()
    figures = setup.folder / f"figures-{setup.run_epoch}.jsonl"
    config = start.project.config
    on_cpu = config.train.device == "cpu" or not torch.cuda.is_available()
    paths = replace(
        Paths.of(start.project, start.run.run_id),
        resume_from=verl_folder(start.newest, config.train),
        step=setup.step,
        validated=start.metrics.validated(),
    )
    chosen = overrides(config, paths, read_family(paths.policy), on_cpu=on_cpu)
    environment = _environment(config, figures, start.run_epoch, on_cpu)
    environment |= place_trackers(config.train.trackers, start.project.state_dir, start.run.run_id)
    os.environ |= environment
    follower = Follower(setup, start.metrics, start.progress, figures)
    start.progress.enter(STARTING)
    work = _aside(lambda: drive(chosen, environment))
    beside = [
        asyncio.create_task(start.progress.report(start.client, lambda: follower.announce(start.client))),
        asyncio.create_task(_follow(follower)),
        asyncio.create_task(_pass_on(stop, setup)),
    ]
    try:
        await asyncio.wait([work, *beside], return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set() and not follower.begun and not work.done():  # verl looks for a stop while it samples only
            return Outcome("stopped", follower.saved, setup.weights(follower.saved))
        await asyncio.wait([work, *beside[:2]], return_when=asyncio.FIRST_COMPLETED)
        for task in beside[:2]:
            if task.done() and not work.done():
                setup.ask_to_end(_failed(task.exception()))
        error = await _outcome(work)
        follower.catch_up()
        return outcome_of(error, setup, follower)
    finally:
        work.cancel()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await start.client.clear_models()
        await start.client.resume()


def drive(chosen: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Compose verl's configuration and run its trainer to the end. Blocks. `environment` is ours already."""
    warnings.filterwarnings("ignore", category=UserWarning, module="verl.workers.engine")
    config = compose(chosen)
    try:
        import ray
        from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    except ModuleNotFoundError as error:
        raise missing(str(error.name)) from error
    before.require_model(config.actor_rollout_ref.model)
    validate(config)
    try:
        run_ppo(config, cluster.begin(config, environment, TaskRunnerV1))
    finally:
        ray.shutdown()


def validate(config: Any) -> None:
    """What verl's workers would refuse once Ray runs, and then not for the last time. Raises ConfigError."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    except (AssertionError, ValueError, TypeError, HydraException, OmegaConfBaseException) as error:
        raise ConfigError(
            f"verl refuses its settings: {' '.join(str(error).split()).rstrip('.')}.",
            "Correct train.verl; `agl up --dry-run` lists all that verl is told.",
        ) from error


def _setup(start: Start) -> Setup:
    saved = start.newest.saved if start.newest else None
    return Setup(
        root=start.project.root,
        config=start.project.config.model_dump(mode="json"),
        run_id=start.run.run_id,
        run_epoch=start.run_epoch,
        **({"step": saved.step, "version": saved.version, "open": saved.open} if saved else {}),
    )


def _environment(config: Config, figures: Path, run_epoch: int, on_cpu: bool) -> dict[str, str]:
    """For this process and all of verl's (`cluster`). Modules that the user has verl load come after agl's."""
    return {
        MODULES: ",".join(filter(None, (PLUGIN, os.environ.get(MODULES)))),
        "VERL_FILE_LOGGER_PATH": str(figures),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_COLOR_PREFIX": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TQ_LOGGING_LEVEL": "ERROR",  # it warns at each transfer of how few cores there are
        "PYTHONWARNINGS": "ignore::UserWarning:verl.workers.engine",  # one for each engine that is not installed
        RUN_EPOCH: str(run_epoch),
        SERVER_KEY: secrets.token_urlsafe(32),
        **({"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": str(config.train.threads)} if on_cpu else {}),
    }


def place_trackers(trackers: Sequence[str], state_dir: Path, run_id: str) -> dict[str, str]:
    """Variables for those of which the user's shell says nothing; their folders are made, as some want them."""
    chosen: dict[str, str] = {}
    for name in trackers:
        places = TRACKER_PLACES.get(name, {})
        if places and not any(map(os.environ.get, places)):
            folder = state_dir / TRACKERS / name
            folder.mkdir(parents=True, exist_ok=True)
            chosen |= {variable: place.format(folder=folder, run=run_id) for variable, place in places.items()}
    return chosen


async def _follow(follower: Follower) -> NoReturn:
    while True:
        follower.catch_up()
        await asyncio.sleep(FOLLOW_EVERY_S)


async def _pass_on(stop: asyncio.Event, setup: Setup) -> None:
    await stop.wait()
    setup.ask_to_end(Ending(kind="stopped"))


def _aside(work: Callable[[], None]) -> asyncio.Future[None]:
    """In a thread that does not keep this process from ending: what it waits for may never come. Ray's processes end
    with this one."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # from now on only who waits for it can be cancelled

    def run() -> None:
        try:
            work()
        except BaseException as error:  # whoever waits gets it
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="verl", daemon=True).start()
    return asyncio.wrap_future(future)


async def _outcome(work: asyncio.Future[None]) -> BaseException | None:
    await asyncio.wait([work])
    return work.exception()


def _failed(error: BaseException | None) -> Ending:
    return Ending(kind="failed", what=str(error), fix="See `agl logs trainer`.")


def outcome_of(error: BaseException | None, setup: Setup, follower: Follower) -> Outcome:
    """How it ended, from what verl raised and what was asked for."""
    ending, step = setup.ending(), follower.saved
    if error is None:
        return Outcome("complete", step, setup.weights(step))
    if ending is None:
        cause = getattr(error, "cause", error)  # of an error in one of Ray's processes
        if isinstance(cause, AglError):
            raise cause
        last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise TrainerError(f"verl failed: {last.rstrip('.')}.", "See `agl logs trainer`.") from error
    if ending.kind == "failed":
        raise TrainerError(ending.what, ending.fix) from error
    reason = None
    if ending.kind == "no_signal":
        tried = setup.project.config.train.no_signal_steps
        why = NO_SPREAD if any(item.trained_tokens for item in follower.unlearnt) else NO_TOKENS
        reason = diagnosis.no_signal(follower.unlearnt, [why] * tried)
        log.warning("%s", reason)
    return Outcome(ending.kind, step, setup.weights(step), reason)
