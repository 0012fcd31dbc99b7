"""`python -m agl_runtime.trainer`: `part` says what every part takes, and `modes` what this one does.

Exit codes: 0 ended in order (summary.json says how), 1 failed, 2 wrong configuration, 3 something is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from agl_runtime.errors import AglError, ConfigError, PreconditionError
from agl_runtime.part import Part, begin, stop_event
from agl_runtime.trainer import modes

log = logging.getLogger("agl_runtime.trainer")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        asyncio.run(_run(begin("trainer", argv, _arguments())))
    except modes.Stopped:
        log.info("stopped before the gateway answered")
    except AglError as error:
        log.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 3 if isinstance(error, PreconditionError) else 1
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--mode", choices=("train", "eval", "serve"), default="train")
    parser.add_argument(
        "--policy", type=Path, help="eval, serve: a Hugging Face folder in place of the newest checkpoint"
    )
    parser.add_argument("--samples", type=int, help="eval: rollouts of each task")
    return parser


async def _run(part: Part) -> None:
    stop, args = stop_event(), part.args
    if args.mode == "eval":
        await modes.evaluate(part, stop, policy=args.policy, samples=args.samples)
    elif args.mode == "serve":
        await modes.serve(part, stop, policy=args.policy)
    else:
        await modes.train(part, stop)


if __name__ == "__main__":
    sys.exit(main())
