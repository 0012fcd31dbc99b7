"""`python -m agl_runtime.controller --root PROJECT`: runs agents until SIGTERM or SIGINT.

Exit codes: 0 stopped, 1 failed, 2 wrong configuration or a broken reward function, 3 something is missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import sys
from collections.abc import Sequence

from agl_runtime import part
from agl_runtime.config import Project
from agl_runtime.controller import capacity
from agl_runtime.controller.attempt import Settings
from agl_runtime.controller.loop import Controller
from agl_runtime.controller.reward import RewardFunction
from agl_runtime.controller.runners.isolation import choose_isolation
from agl_runtime.controller.runners.process import ProcessRunner
from agl_runtime.errors import AglError, ConfigError, PreconditionError, RewardError

log = logging.getLogger("agl_runtime.controller")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        asyncio.run(_run(part.begin("controller", argv)))
    except AglError as error:
        log.error("%s", error)
        return 2 if isinstance(error, ConfigError | RewardError) else 3 if isinstance(error, PreconditionError) else 1
    return 0


async def _run(begun: part.Part) -> None:
    """Until the first agent may run, a signal simply ends the process."""
    project = begun.project
    isolation = choose_isolation(project.config.agent.isolation)
    reward = RewardFunction(project) if project.config.reward.function else None
    if reward is not None:
        await reward.check()
    client = await part.connect(begun)
    runner = ProcessRunner(project, client.url, isolation)
    runner.clean_up()
    settings = settings_of(project)
    log.info("up to %d agents at once; isolation: %s", settings.limit, isolation)
    warming = asyncio.create_task(runner.try_warm())  # while the policy is being loaded
    try:
        async with client:
            await Controller(client, runner, reward, settings).run(part.stop_event())
    finally:
        warming.cancel()
        runner.close()


def settings_of(project: Project) -> Settings:
    """The controller's name is the project's on this machine: a restart gets its own rollouts back at once."""
    agent = project.config.agent
    place = hashlib.blake2b(os.fsencode(project.state_dir.resolve()), digest_size=6).hexdigest()
    automatic = capacity.agents_at_once(capacity.usable_cores(), capacity.available_mb(), agent.memory_mb)
    return Settings(
        controller_id=f"{socket.gethostname()}-{place}",
        limit=agent.concurrency or automatic,
        attempts=agent.attempts,
        timeout_s=agent.timeout_s,
        reports_reward=agent.reports_reward,
    )


if __name__ == "__main__":
    sys.exit(main())
