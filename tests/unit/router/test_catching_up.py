"""Whether a router that starts waits for its mirror, before a real Valkey and a clock that is set by hand."""

from dataclasses import dataclass

import pytest

from headrace import store as stores
from headrace.keys import Keys
from headrace.ports import free_port
from router.catching_up import MAX_SECONDS, CatchingUp

KEYS = Keys("starting")
URL = f"redis://127.0.0.1:{free_port()}/0"  # nobody listens there


@dataclass
class Mirror:
    num_scans: int = 0


@dataclass
class ByHand:
    time: float = 100.0

    def now(self) -> float:
        return self.time


async def starting(url: str, *routers: str) -> tuple[CatchingUp, Mirror, ByHand]:
    """A router "t" beside those that report to Redis."""
    store, mirror, clock = stores.connect(url, budget_seconds=10.0), Mirror(), ByHand()
    try:
        if routers:
            await store.call(lambda redis: redis.flushall())
            await store.call(lambda redis: redis.mset({KEYS.router(name): "{}" for name in routers}))
        catching_up = CatchingUp(store, KEYS, "t", mirror, clock)
        assert catching_up.why() is not None, "it is not known yet"
        await catching_up.run()
    finally:
        await store.close()
    return catching_up, mirror, clock


@pytest.mark.redis
async def test_case_39_a_router_that_joins_others_is_ready_once_its_mirror_is_read(redis_url: str) -> None:
    catching_up, mirror, _ = await starting(redis_url, "t", "other")
    assert catching_up.why() == "the index is being read, and other routers serve"
    mirror.num_scans = 1
    assert catching_up.why() is None


@pytest.mark.redis
async def test_but_not_later_than_after_its_time(redis_url: str) -> None:
    catching_up, _, clock = await starting(redis_url, "other")
    clock.time += MAX_SECONDS - 0.1
    assert catching_up.why() is not None
    clock.time += 0.1
    assert catching_up.why() is None


@pytest.mark.redis
async def test_the_only_router_is_ready_at_once(redis_url: str) -> None:
    catching_up, _, _ = await starting(redis_url, "t")
    assert catching_up.why() is None


async def test_without_redis_it_is_taken_to_be_the_only_one() -> None:
    catching_up, _, _ = await starting(URL)
    assert catching_up.why() is None
