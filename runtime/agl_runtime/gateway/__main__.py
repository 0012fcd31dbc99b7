"""`python -m agl_runtime.gateway`: `part` says what every part takes.

Exit codes: 0 stopped, 1 failed, 2 wrong configuration, 3 something is missing (the port is taken).
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
import uvloop
from fastapi import FastAPI

from agl_runtime.errors import AglError, ConfigError, PreconditionError, StoreError
from agl_runtime.gateway.app import create_app
from agl_runtime.part import GATEWAY_FILE, STORE_FILE, Part, announce_gateway, begin, gateway_url, stop_event
from agl_runtime.store.base import Store
from agl_runtime.store.sqlite import open_store

BACKLOG = 2048
PRUNE_EVERY_S = 60.0
STOP_GRACE_S = 10
# Longer than agents' HTTP clients keep idle connections, so that none is closed just as it is used again.
KEEP_ALIVE_S = 600
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
logger = logging.getLogger("agl_runtime.gateway")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        uvloop.run(_run(begin("gateway", argv)))
    except AglError as error:
        logger.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 3 if isinstance(error, PreconditionError) else 1
    return 0


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PreconditionError for a port that is taken, ConfigError for an address that is not
    this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            what = f"The gateway cannot listen on port {port} of {host}: {os.strerror(error.errno)}."
            raise PreconditionError(what, "Set gateway.port to a free port, or to 0 for any.") from error
        what = f"The gateway cannot listen on {host}: {error.strerror}."
        raise ConfigError(what, "Set gateway.host to an address of this machine.") from error


def listen_again(host: str, port: int, state_dir: Path) -> socket.socket:
    """As `listen`; where any port will do, the one of a gateway that was killed, whose agents still call it there."""
    if port == 0:
        with suppress(PreconditionError, ValueError):
            return listen(host, urlsplit(gateway_url(state_dir)).port or 0)
    return listen(host, port)


def url_of(host: str, listener: socket.socket) -> str:
    """The URL under which this machine reaches a listener on `host`."""
    named = _EVERYWHERE.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{named}:{listener.getsockname()[1]}"


class QuietServer(uvicorn.Server):
    """Leaves signals to the part."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(part: Part) -> None:
    stop, state_dir, settings = stop_event(), part.project.state_dir, part.project.config.gateway
    store = open_store(state_dir / STORE_FILE)
    pruning = asyncio.create_task(_prune(store, settings.keep_rollouts))
    try:
        app = create_app(part.project.config, store, part.admin_key)
        with listen_again(settings.host, settings.port, state_dir) as listener:
            url = url_of(settings.host, listener)
            announce_gateway(state_dir, url)
            logger.info("listening at %s", url)
            _spare_the_collector()
            await _serve(app, listener, stop)
            (state_dir / GATEWAY_FILE).unlink(missing_ok=True)
    finally:
        pruning.cancel()
        await store.close()


async def _serve(app: FastAPI, listener: socket.socket, stop: asyncio.Event) -> None:
    """Until `stop`, or until the server ends by itself. What waits is let go first, what runs gets STOP_GRACE_S."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        ws="none",
        http="httptools",
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_GRACE_S,
    )
    server = QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    app.state.gateway.stop()
    server.should_exit = True
    await serving


def _spare_the_collector() -> None:
    """What is there at the start stays, and an answer's hundreds of small objects are no garbage in cycles: looking
    through all of them again and again would take a fifth of the gateway's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def _prune(store: Store, keep_rollouts: int) -> None:
    while True:
        try:
            if gone := await store.prune(keep_rollouts):
                logger.info("deleted %d old rollouts", gone)
        except StoreError as error:
            logger.warning("old rollouts were not deleted: %s", error)
        await asyncio.sleep(PRUNE_EVERY_S)


if __name__ == "__main__":
    sys.exit(main())
