from __future__ import annotations

import asyncio

import pytest

from agl_runtime.errors import TrainerError
from agl_runtime.trainer.backends.verl import servers


async def test_a_server_that_refuses_connections_for_good_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "CHECK_S", 0.01)
    here = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{here.sockets[0].getsockname()[1]}"
    watching = asyncio.create_task(servers.watch([address]))
    done, _ = await asyncio.wait([watching], timeout=0.2)
    assert not done
    here.close()
    await here.wait_closed()
    with pytest.raises(TrainerError, match=rf"verl's rollout server at {address} is gone\."):
        await asyncio.wait_for(watching, 10)
