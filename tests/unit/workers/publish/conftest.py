"""An empty Redis, looked at as it is."""

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from redis.asyncio import Redis


@pytest_asyncio.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    client = Redis.from_url(redis_url)
    await client.flushdb()
    yield client
    await client.aclose()
