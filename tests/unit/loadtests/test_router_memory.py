"""What bench-router measures of 10⁶ prefixes, at a smaller number and in counts."""

import asyncio

import pytest
from redis.asyncio import Redis

from headrace.keys import STREAM_MIN_BLOCKS, Keys
from loadtests.router_memory import OWN_BLOCKS, SHARED_BLOCKS, Prefixes

pytestmark = pytest.mark.redis
KEYS = Keys("bench")
WORKERS = [f"w{number}" for number in range(4)]
LIMIT = 256


async def test_case_38_distinct_prefixes_under_a_shared_prompt_leave_router_and_redis_flat(redis_url: str) -> None:
    """Each worker's cache turns over many times; what the router keeps of it is what the workers hold."""
    redis = Redis.from_url(redis_url)
    await redis.flushall()
    prefixes = Prefixes(redis_url, LIMIT)
    try:
        await prefixes.begin()
        async with asyncio.timeout(60):
            for _ in range(4):
                await prefixes.run(1024)
                assert prefixes.index.num_keys <= len(WORKERS) * LIMIT
                assert prefixes.index.overlay.num_blocks <= len(WORKERS) * LIMIT
                assert len(await redis.keys(f"hr:{KEYS.cluster}:*")) == 3 * len(WORKERS)
                for worker in WORKERS:
                    assert await redis.hlen(KEYS.blocks(worker)) <= LIMIT + 1
                    assert await redis.xlen(KEYS.events(worker)) * OWN_BLOCKS <= 2 * STREAM_MIN_BLOCKS
        assert prefixes.num_cached >= 0.9 * 4096 * SHARED_BLOCKS * 32, "the shared prompt was not found"
    finally:
        await prefixes.close()
        await redis.aclose()
