"""What every process of verl loads first (`VERL_USE_EXTERNAL_MODULES`): agl's estimators, and on a machine without a
GPU a platform, an engine and a rollout server that need none."""

from __future__ import annotations

import os

from agl_runtime.trainer.backends.verl.estimators import register as register_estimators

PLATFORM = "VERL_PLATFORM"


def register() -> None:
    register_estimators()
    if os.environ.get(PLATFORM) == "cpu":
        from agl_runtime.trainer.backends.verl import cpu

        cpu.register()


register()
